"""Peak device memory against depth: a deeper model needs more host memory, not more device.

Models that differ in depth only are trained for a few steps under the same budget, and the most
device memory that was in use is measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.errors import ConfigError
from atomtrain.models import GPT, GPTConfig
from atomtrain.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class DepthSetup:
    """Inputs of the benchmark."""

    depths: tuple[int, ...] = (8, 32, 96)
    """Numbers of blocks."""
    width: int = 128
    vocabulary: int = 1024
    sequence_tokens: int = 128
    sequences: int = 2
    """Sequences in a micro-batch."""
    micro_batches: int = 2
    """Micro-batches in a step."""
    steps: int = 2
    """Steps of each model; the second overlaps the updates of the first."""
    device_memory_bytes: int = 7 << 20
    """The budget, the same for all: little more than the finest schedule needs. Of a larger one the
    planner makes use, for each depth as it pays."""
    segment_layers: int = 1
    """Layers of a segment (embedding and head count)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths:
            raise ConfigError("depths is empty; give at least one number of layers, such as 8")
        require_positive(self)


QUICK = DepthSetup(depths=(8, 32))


def run(options: BenchmarkOptions, setup: DepthSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` leaves out the deepest model.
        setup: Inputs of one's own.

    Raises:
        PlanError: the budget is too small for one layer.
    """
    setup = setup or (QUICK if options.quick else DepthSetup())
    torch.manual_seed(setup.seed)
    measured = {str(depth): _measure(setup, depth) for depth in setup.depths}
    keys = ("device_peak_bytes", "predicted_device_peak_bytes", "state_bytes", "plan_segments")
    return {
        **{key: {depth: row[key] for depth, row in measured.items()} for key in keys},
        "device_budget_bytes": setup.device_memory_bytes,
        "inputs": asdict(setup),
        **description(),
    }


def _measure(setup: DepthSetup, depth: int) -> dict[str, int]:
    model = GPT(
        GPTConfig(
            layers=depth,
            width=setup.width,
            heads=2,
            head_width=setup.width // 2,
            vocabulary=setup.vocabulary,
            context=setup.sequence_tokens,
        )
    )
    state_bytes = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    shape = (setup.sequences, setup.sequence_tokens + 1)
    tokens = [torch.randint(setup.vocabulary, shape) for _ in range(setup.micro_batches)]
    batches = [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]
    peak_bytes = 0
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        device="emulated",
        device_memory=setup.device_memory_bytes,
        options=atomtrain.Options(
            micro_batches=setup.micro_batches,
            segments=-(-(depth + 2) // setup.segment_layers),
            slots=2,
            gradient_buffers=2,
            activations="recompute",
        ),
    ) as engine:
        for _ in range(setup.steps):
            engine.step(batches)
            assert engine.last is not None
            peak_bytes = max(peak_bytes, engine.last.device_peak_bytes)
        plan = engine.plan
    progress(
        f"{depth} layers: state {format_bytes(state_bytes)}, device peak "
        f"{format_bytes(peak_bytes)} of {format_bytes(setup.device_memory_bytes)}"
    )
    return {
        "device_peak_bytes": peak_bytes,
        "predicted_device_peak_bytes": plan.device_peak_bytes,
        "state_bytes": state_bytes,
        "plan_segments": plan.segments,
    }
