"""State on disk against state in memory: resident set, step time, bytes written.

For each precision and each choice of what is on disk, a process of its own trains a GPT on the
emulated device and reads its resident set; what the device holds and what was there before are
taken off. Time is that of whole steps, updates and disk included, one after the other. Both are
compared with what the plan says, whose rates are measured on the same machine. Losses must be the
same bits whatever is on disk.

The disk is that of temporary files (`TMPDIR`). `python -m atombench.engine.disk JSON` is such a
process: it prints one JSON object.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atombench.engine.apart import EXACT_MEMORY, measured_apart, memory_bytes
from atomtrain.engine.api import swap
from atomtrain.engine.calibration.disk_profile import measured_rates
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import AdamW
from atomtrain.units import format_bytes, format_seconds

_WARM_STEPS = 2
_HEAD_WIDTH = 64
OnDiskName = Literal["nothing", "moments", "masters", "parameters"]


@dataclass(frozen=True, kw_only=True)
class DiskCase:
    """The GPT that is trained."""

    layers: int = 12
    width: int = 768
    """A multiple of 64."""
    vocabulary: int = 8192
    context: int = 64
    """Tokens of a sequence."""
    micro_batches: int = 4
    """Of one sequence each."""
    steps: int = 4
    """Timed ones."""
    device_memory: str = "256MiB"

    def __post_init__(self) -> None:
        require_positive(self)


def measure(on_disk: OnDiskName, precision: str, case: DiskCase, folder: Path) -> Result:
    """Train in this process; return what it took of memory, disk and time."""
    # What libraries load and keep is there before the case begins.
    small = DiskCase(layers=2, width=64, vocabulary=64, steps=1)
    tiny = _opened(on_disk, precision, small, folder)
    tiny.step(_batches(small))
    tiny.close()
    gc.collect()
    before_bytes = memory_bytes()
    engine = _opened(on_disk, precision, case, folder)
    for _ in range(_WARM_STEPS):
        engine.step(_batches(case))
    engine.synchronize()
    traffic = engine.disk
    started_s = time.perf_counter()
    losses = [engine.step(_batches(case)) for _ in range(case.steps)]
    engine.synchronize()
    step_s = (time.perf_counter() - started_s) / case.steps
    now = engine.disk
    gc.collect()
    grown_bytes = memory_bytes() - before_bytes
    engine.device.reset_peak()  # a new peak begins with what is there
    host_bytes = grown_bytes - engine.device.peak_bytes()
    result: Result = {
        "parameters": engine.parameters,
        "host_bytes": host_bytes,
        "predicted_host_bytes": engine.plan.host_bytes,
        "host_bytes_per_parameter": host_bytes / engine.parameters,
        "step_s": step_s,
        "predicted_step_s": engine.plan.step_s,
        "step_error_share": engine.plan.step_s / step_s - 1,
        "bound": engine.plan.bound,
        "disk_read_bytes": 0,
        "disk_written_bytes": 0,
        "direct": False,
        "digest": hashlib.sha256(repr(losses).encode()).hexdigest()[:16],
    }
    if now is not None and traffic is not None:
        result["disk_read_bytes"] = (now.read_bytes - traffic.read_bytes) // case.steps
        result["disk_written_bytes"] = (now.written_bytes - traffic.written_bytes) // case.steps
        result["direct"] = now.direct
    engine.close()
    return result


def _opened(on_disk: OnDiskName, precision: str, case: DiskCase, folder: Path) -> Engine:
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
    return swap(
        model,
        _batches(case)[0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-4),
        device="emulated:8GiB/s",
        device_memory=case.device_memory,
        options=Options(
            micro_batches=case.micro_batches,
            precision="bf16" if precision == "bf16" else None,
            disk=folder,
            on_disk=on_disk,
        ),
    )


def _batches(case: DiskCase) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(case.micro_batches):
        tokens = torch.randint(case.vocabulary, (1, case.context + 1), generator=generator)
        batches.append({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    return batches


def main() -> None:
    """Measure as the command line says."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = DiskCase(**order["case"])
    on_disk = cast(OnDiskName, order["on_disk"])
    result = measure(on_disk, order["precision"], case, Path(order["folder"]))
    sys.stdout.write(json.dumps({**result, "case": asdict(case)}) + "\n")


ROWS = (
    ("fp32", "nothing"),
    ("fp32", "moments"),
    ("fp32", "parameters"),
    ("bf16", "nothing"),
    ("bf16", "moments"),
    ("bf16", "masters"),
    ("bf16", "parameters"),
)
"""Precision, and up to which kind of state is on disk."""


@dataclass(frozen=True, kw_only=True)
class DiskSetup:
    """Inputs of the benchmark."""

    case: DiskCase = field(default_factory=DiskCase)
    rows: tuple[tuple[str, str], ...] = ROWS


QUICK = DiskSetup(
    case=DiskCase(
        layers=4, width=512, vocabulary=2048, steps=3, micro_batches=2, device_memory="40MiB"
    ),
    rows=ROWS[:3],
)


def run(options: BenchmarkOptions, setup: DiskSetup | None = None) -> Result:
    """Measure, and return a row for each precision and choice, and the inputs.

    Raises:
        BenchmarkError: a process that measures failed.
        DiskError: the disk of temporary files cannot be used.
    """
    setup = setup or (QUICK if options.quick else DiskSetup())
    folder = Path(tempfile.gettempdir())
    rates = measured_rates(folder)
    rows = []
    for precision, on_disk in setup.rows:
        row = {"precision": precision, "on_disk": on_disk, **_measured(precision, on_disk, setup)}
        row.pop("case")
        rows.append(row)
        progress(
            f"{precision} {on_disk}: {row['host_bytes_per_parameter']:.1f} bytes a parameter in "
            f"memory, {format_seconds(row['step_s'])} a step (predicted "
            f"{format_seconds(row['predicted_step_s'])}), "
            f"{format_bytes(row['disk_written_bytes'])} written"
        )
    digests = {row["precision"]: {r["digest"] for r in rows if r["precision"] == row["precision"]}
               for row in rows}  # fmt: skip
    return {
        "rows": rows,
        "bit_equal": all(len(found) == 1 for found in digests.values()),
        "disk": rates._asdict(),
        "inputs": asdict(setup),
        **description(),
    }


def _measured(precision: str, on_disk: str, setup: DiskSetup) -> Result:
    order = {
        "precision": precision,
        "on_disk": on_disk,
        "case": asdict(setup.case),
        "folder": tempfile.gettempdir(),
        "threads": torch.get_num_threads(),
    }
    what = f"{precision} with {on_disk} on disk"
    return measured_apart("atombench.engine.disk", order, what, EXACT_MEMORY)


if __name__ == "__main__":
    main()
