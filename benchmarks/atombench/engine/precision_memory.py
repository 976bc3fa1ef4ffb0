"""What one kind of state takes on the host, measured in a process of its own.

`python -m atombench.engine.precision_memory JSON` trains a little and prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from atombench.checks import require_positive
from atombench.common import Result
from atomtrain.engine.api import swap
from atomtrain.engine.devices.host_memory import give_back
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.models import GPT, GPTConfig
from atomtrain.training.config.new_recipe import make_optimizer, new_recipe
from atomtrain.training.config.options import TrainOptions

_STEPS = 2
_CLIP_NORM = 1.0
_HEAD_WIDTH = 64


class Kind(NamedTuple):
    """How parameters, gradients and state are stored."""

    precision: str
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """The GPT whose memory is measured."""

    layers: int = 16
    width: int = 1024
    """A multiple of 64. Large enough that what does not grow with the model, such as scratch,
    makes less than a hundredth."""
    vocabulary: int = 8192
    context: int = 16
    """Tokens of a sequence; few, since only memory is looked at."""
    device_memory: str = "192MiB"

    def __post_init__(self) -> None:
        require_positive(self)


def measure(kind: Kind, case: MemoryCase, *, spends: bool = False) -> Result:
    """Train in this process; return what the host holds afterwards, and what was predicted.

    The global norm is clipped, so that all gradients wait on the host, unless it `spends` them.
    """
    # What libraries load and keep is there before the case begins.
    _trained(kind, MemoryCase(layers=2, width=64, vocabulary=64), spends=spends).close()
    gc.collect()
    give_back()
    before_bytes = resident_bytes()
    engine = _trained(kind, case, spends=spends)
    engine.synchronize()
    gc.collect()
    give_back()  # holes that the device's activations left in the heap are nobody's
    grown_bytes = resident_bytes() - before_bytes
    # A new peak begins with what is there.
    engine.device.reset_peak()
    device_bytes = engine.device.peak_bytes()
    host_bytes = grown_bytes - device_bytes
    result = {
        "parameters": engine.parameters,
        "measured_host_bytes": host_bytes,
        "predicted_host_bytes": engine.plan.host_bytes,
        "host_error_share": engine.plan.host_bytes / host_bytes - 1,
        "measured_bytes_per_parameter": host_bytes / engine.parameters,
        "device_bytes": device_bytes,
    }
    engine.close()
    return result


def precision_of(kind: Kind) -> Literal["bf16"] | None:
    """Return what the engine calls the precision."""
    return "bf16" if kind.precision == "bf16" else None


def _trained(kind: Kind, case: MemoryCase, *, spends: bool) -> Engine:
    recipe = new_recipe(TrainOptions(model="tiny", **kind._asdict()))
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            layers=case.layers,
            width=case.width,
            heads=max(1, case.width // _HEAD_WIDTH),
            head_width=_HEAD_WIDTH,
            vocabulary=case.vocabulary,
            context=case.context,
        )
    )
    engine = swap(
        model,
        _batch(case),
        optimizer=lambda _: make_optimizer(model, recipe),
        device="emulated",
        device_memory=case.device_memory,
        options=Options(
            precision=precision_of(kind),
            clip_norm=None if spends else _CLIP_NORM,
            spend_gradients=spends,
            profile=False,
        ),
    )
    for _ in range(_STEPS):
        engine.step([_batch(case)])
    return engine


def _batch(case: MemoryCase) -> dict[str, Tensor]:
    tokens = torch.randint(case.vocabulary, (1, case.context + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def resident_bytes() -> int:
    """Return the resident set of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "VmRSS":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/self/status has no VmRSS; this benchmark needs Linux")


def main() -> None:
    """Measure one kind as the command line says."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = MemoryCase(**order["case"])
    result = measure(Kind(*order["kind"]), case, spends=order["spends"])
    sys.stdout.write(json.dumps({**result, "case": asdict(case)}) + "\n")


if __name__ == "__main__":
    main()
