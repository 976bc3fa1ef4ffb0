"""One case of the benchmark `plan`, in a process of its own.

`python -m atombench.engine.plan_case JSON` trains and prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import atomtrain
from atombench.common import Result, require_positive
from atombench.engine.apart import forget_peak, memory_bytes
from atomtrain.engine.calibration import profiling
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.engine import Engine
from atomtrain.models import GPT, GPTConfig
from atomtrain.planning.cost.memory import MemoryModel

MicroBatches = list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A model, its steps, and the device that it is trained on."""

    layers: int
    """Blocks of the GPT."""
    width: int
    vocabulary: int = 2048
    tied: bool = True
    """Embedding and head share their weight."""
    sequence_tokens: int = 128
    sequences: int = 2
    """Sequences in a micro-batch."""
    micro_batches: int = 4
    """Micro-batches in a step."""
    state_per_budget: float = 5.0
    """Parameters, gradients and moments in multiples of the device budget; above 0."""
    link_bytes_per_s: float = 1024.0 * 2**20
    """Emulated link, each direction."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)


def measure_steps(case: PlanCase, rounds: int, steps: int, warmup_steps: int) -> Result:
    """Time layers and train by turns; return what each predicts, and what steps took.

    The plan is made from a whole profile, as any user's is; each round then trains some steps and
    times the layers again. A machine's speed changes while it is measured, and both see the same.
    """
    data = [_step_data(case) for _ in range(3)]
    seconds: list[list[float]] = []
    with _trained(case, data) as engine:
        predicted = [engine.plan.step_s]
        for _ in range(rounds):
            # A round's first step does not count: layers were timed before it. The process's very
            # first steps touch memory and wait for it, too.
            for step in range(1 if seconds else warmup_steps):
                engine.step(data[step % len(data)])
            timed = []
            for step in range(steps):
                started_s = time.perf_counter()
                engine.step(data[step % len(data)])
                timed.append(time.perf_counter() - started_s)
            seconds.append(timed)
            engine.synchronize()
            predicted.append(_predicted_again(engine, data[0][0]))
        plan = engine.plan
    return {
        "predicted_step_s": statistics.median(predicted),
        "measured_step_s": statistics.median(step_s for timed in seconds for step_s in timed),
        "predictions_s": predicted,
        "steps_s": seconds,
        "bound": plan.bound,
        "forward_segments": len(plan.forward_bounds) - 1,
        "backward_segments": plan.segments,
        "resident_blocks": len(plan.resident_blocks),
        "device_blocks": len(plan.shape.device_blocks),
        "host_layers": plan.host_layers,
        "recomputed_layers": len(plan.recomputed),
        "boundary": plan.boundary,
    }


def measure_memory(case: PlanCase) -> Result:
    """Train three steps; return the predicted peaks and the measured ones.

    For a process of its own: it takes the profile that is there, however it was taken.
    """
    # A profile that is taken meanwhile leaves 6 MiB: pages of the libraries' code, and garbage.
    profiling.crowded_now = _crowded
    _warm_up()
    before_bytes = memory_bytes("VmRSS")
    data = [_step_data(case) for _ in range(3)]
    peak_bytes = 0
    with _trained(case, data, touched=True) as engine:
        forget_peak()
        for step, batches in enumerate(data):
            engine.step(batches)
            assert engine.last is not None
            peak_bytes = max(peak_bytes, engine.last.device_peak_bytes)
            if step + 2 == len(data):
                # As a checkpoint does: what blocks updated on the device left there comes home.
                engine.synchronize()
        engine.synchronize()
        host_bytes = memory_bytes("VmHWM") - before_bytes
        plan, beside_bytes = engine.plan, _device_bytes_at_host_peak(engine)
    return {
        "predicted_device_peak_bytes": plan.device_peak_bytes,
        "measured_device_peak_bytes": peak_bytes,
        "predicted_host_peak_bytes": plan.host_bytes + beside_bytes,
        "measured_host_peak_bytes": host_bytes,
        "device_budget_bytes": plan.device_memory_bytes,
    }


@contextmanager
def _trained(
    case: PlanCase, data: list[MicroBatches], *, touched: bool = False
) -> Iterator[Engine]:
    """Yield an engine of the case; `touched`: all pages of its buffers are there at once."""
    model = _model(case)
    with _opened(case, model) as device:
        if touched:
            _touch_memory(device)
        with atomtrain.swap(
            model,
            data[0][0],
            optimizer=_adamw,
            device=device,
            options=atomtrain.Options(micro_batches=case.micro_batches),
        ) as engine:
            yield engine


def _predicted_again(engine: Engine, micro_batch: dict[str, Tensor]) -> float:
    """Return what is predicted for the plan that the engine follows, with layers timed anew.

    Rates of link, disk and optimizer stay those of the first profile: layers are what most of the
    time is spent on, and on what changes with the processor's speed.
    """
    planner = engine.planner
    times = profiling.measured_times(engine.device, planner.chain, planner.costs, micro_batch)
    again = dataclasses.replace(planner, times=times)
    return max(span.end_s for span in again.spans(engine.plan))


def _device_bytes_at_host_peak(engine: Engine) -> int:
    """Return what is on the device, less what is not on the host, when both together are most.

    Either a visit runs on the device, or backward of layers on the host.
    """
    plan, planner = engine.plan, engine.planner
    memory = MemoryModel(planner.chain, planner.costs, plan.micro_batches, planner.updates)
    aside_bytes = memory.host_backward_bytes(plan.host_layers)
    return max(plan.device_peak_bytes - aside_bytes, memory.held_bytes(plan.shape))


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _model(case: PlanCase) -> GPT:
    torch.manual_seed(case.seed)
    heads = max(1, case.width // 64)
    model = GPT(
        GPTConfig(
            layers=case.layers,
            width=case.width,
            heads=heads,
            head_width=case.width // heads,
            vocabulary=case.vocabulary,
            context=case.sequence_tokens,
        )
    )
    if not case.tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _step_data(case: PlanCase) -> MicroBatches:
    shape = (case.sequences, case.sequence_tokens + 1)
    batches = (torch.randint(case.vocabulary, shape) for _ in range(case.micro_batches))
    return [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in batches]


@contextmanager
def _opened(case: PlanCase, model: GPT) -> Iterator[Device]:
    state_bytes = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    budget_bytes = int(state_bytes / case.state_per_budget)
    device = open_device(f"emulated:{int(case.link_bytes_per_s)}B/s", budget_bytes)
    try:
        yield device
    finally:
        device.close()


def _warm_up() -> None:
    """Train a tiny model, so that what libraries load and keep is there before the case begins."""
    case = PlanCase(layers=2, width=64, vocabulary=64, sequence_tokens=16, micro_batches=2)
    model = _model(case)
    with atomtrain.swap(
        model,
        _step_data(case)[0],
        optimizer=_adamw,
        device="emulated",
        options=atomtrain.Options(micro_batches=case.micro_batches, profile=False),
    ) as engine:
        for _ in range(3):
            engine.step(_step_data(case))


def _touch_memory(device: Device) -> None:
    """Make all pages of buffers be there at once, as a GPU's pinned memory and its own are."""
    host_empty, empty = device.host_empty, device.empty

    def touched_on_host(n_bytes: int) -> Tensor:
        return host_empty(n_bytes).zero_()

    def touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return empty(shape, dtype).zero_()

    device.host_empty = touched_on_host  # type: ignore[method-assign]
    device.empty = touched  # type: ignore[method-assign]


def _crowded(watched_s: float = 0.0) -> float:
    """Stand for a processor on which nothing would be measured again."""
    del watched_s
    return math.inf


def main() -> None:
    """Run one case as the command line says."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = PlanCase(**order["case"])
    times = order["times"]
    result = measure_memory(case) if times is None else measure_steps(case, **times)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
