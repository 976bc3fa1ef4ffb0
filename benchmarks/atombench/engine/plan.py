"""Predictions against reality: step time, device peak and host peak of many plans.

Each case is a model, a budget and a link. A fresh process profiles, plans and trains as any user's.
Then it times layers and trains again, by turns, since a machine's speed changes by tens of percent
within seconds. What is compared:

- *Step time*: the median of what all these times predict for the plan, with the median of the
  timed steps. `predictions_s` has each, the first of them the one that a user would have seen.
- *Device peak*: the plan's prediction with the most that the emulated device had in use; it counts
  every storage.
- *Host peak*: the plan's host bytes with the growth of the process's resident set over training.
  The emulated device's memory is host memory, so both sides contain what is on the device then: its
  peak, or less while layers on the host, for which it waits, run backward. All pages of
  buffers are touched first, as a GPU's memory and what is pinned are there from their start (a slot
  is as large as the largest segment, whichever is in it), and a step follows after all state came
  to the host, as for a checkpoint: that is what a plan reserves memory for.

Prediction errors are shares of the measured value: above 0 the plan promised too much use.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.apart import measured_apart
from atombench.engine.plan_case import PlanCase
from atomtrain.errors import ConfigError
from atomtrain.units import format_bytes, format_seconds

_MIB = 2**20
_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
"""glibc keeps much of what was freed for later, within the resident set, and MKL, which computes
for the emulated device, keeps what it rearranged matrices in: 6 to 20 MiB. So a second process,
whose times do not count, gives both back at once: then what is resident is what is in use. It takes
the profile of the first one: to take one leaves 6 MiB, most of them pages of libraries' code."""
_MEASURES = ("step_s", "device_peak_bytes", "host_peak_bytes")


@dataclass(frozen=True, kw_only=True)
class PlanSetup:
    """Inputs of the benchmark."""

    cases: tuple[PlanCase, ...]
    rounds: int = 3
    """How often steps and times of layers take turns; at least 1."""
    steps: int = 3
    """Timed steps of a round; at least 1."""
    warmup_steps: int = 2
    """Steps before the first round; at least 1, because the first one touches memory."""
    threads: int | None = max(1, (os.cpu_count() or 1) // 2)
    """CPU threads of compute; `None` is torch's default. Half of the cores: a GPU does not compute
    on those that copy and update."""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ConfigError("there are no cases; give at least one")
        for name in ("rounds", "steps", "warmup_steps", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")


FULL = PlanSetup(
    cases=(
        # Compute-bound: a fast link, or much to compute for each byte.
        PlanCase(layers=8, width=384, micro_batches=4, link_bytes_per_s=4096 * _MIB),
        PlanCase(layers=4, width=768, state_per_budget=4),
        PlanCase(layers=16, width=256, micro_batches=4, link_bytes_per_s=2048 * _MIB),
        PlanCase(
            layers=6, width=512, sequence_tokens=512, sequences=1, micro_batches=3,
            state_per_budget=4,
        ),
        PlanCase(layers=12, width=320, sequences=4, tied=False, state_per_budget=6),
        # Nearly enough memory for everything.
        PlanCase(layers=6, width=256, vocabulary=1024, micro_batches=2, state_per_budget=0.8),
        # Large vocabularies: one weight is a third of the model.
        PlanCase(
            layers=6, width=256, vocabulary=16384, sequences=1, micro_batches=6,
            state_per_budget=1.5,
        ),
        PlanCase(
            layers=6, width=384, vocabulary=12000, tied=False, sequences=1, micro_batches=4,
            state_per_budget=2,
        ),
        # In between.
        PlanCase(layers=8, width=512, sequences=1, link_bytes_per_s=512 * _MIB),
        PlanCase(layers=10, width=384, micro_batches=1, sequences=4, link_bytes_per_s=384 * _MIB),
        PlanCase(layers=24, width=192, micro_batches=2, link_bytes_per_s=256 * _MIB),
        # Link-bound.
        PlanCase(layers=8, width=512, sequences=1, micro_batches=1, link_bytes_per_s=192 * _MIB),
        PlanCase(layers=12, width=256, sequences=1, micro_batches=2, link_bytes_per_s=96 * _MIB),
        PlanCase(
            layers=4, width=640, vocabulary=4096, tied=False, sequences=1, micro_batches=2,
            link_bytes_per_s=128 * _MIB, state_per_budget=3,
        ),
    )
)  # fmt: skip
QUICK = PlanSetup(
    cases=(
        PlanCase(layers=8, width=256, micro_batches=2),
        PlanCase(
            layers=4, width=256, vocabulary=8192, sequences=1, micro_batches=4, state_per_budget=1.5
        ),
        PlanCase(layers=8, width=256, sequences=1, micro_batches=1, link_bytes_per_s=128 * _MIB),
    ),
    rounds=2,
)  # fmt: skip


def run(options: BenchmarkOptions, setup: PlanSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` runs fewer and smaller cases; `case` names those to run, from 1.
        setup: Inputs of one's own.

    Raises:
        ConfigError: there is no such case.
        PlanError: a case's budget is too small for its model.
        BenchmarkError: a case's process failed.
    """
    setup = _chosen(setup or (QUICK if options.quick else FULL), options.case)
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    rows = []
    for index, case in enumerate(setup.cases):
        with tempfile.TemporaryDirectory(prefix="atom-bench-plan-") as folder:
            row = _run_case(case, setup, Path(folder))
        progress(f"case {index + 1} of {len(setup.cases)}: {_sentence(row)}")
        rows.append(row)
    return {
        "cases": rows,
        **_summary(rows),
        "threads": torch.get_num_threads(),
        "inputs": asdict(setup),
        **description(),
    }


def _chosen(setup: PlanSetup, numbers: Sequence[int]) -> PlanSetup:
    """Return a setup with the cases of these numbers only, from 1; none: all."""
    if not numbers:
        return setup
    for number in numbers:
        if not 1 <= number <= len(setup.cases):
            raise ConfigError(
                f"--case {number} does not exist; choose a number from 1 to {len(setup.cases)}"
            )
    return replace(setup, cases=tuple(setup.cases[number - 1] for number in numbers))


def _run_case(case: PlanCase, setup: PlanSetup, folder: Path) -> Result:
    """Profile, plan and train in one fresh process, and look at memory in another."""
    environment = {"XDG_CACHE_HOME": str(folder)}
    times = {name: getattr(setup, name) for name in ("rounds", "steps", "warmup_steps")}
    row = _trained(case, times, environment)
    # By the same plan: the first process left its first profile in the folder.
    row |= _trained(case, None, {**environment, **_EXACT_MEMORY})
    for name in _MEASURES:
        share = row[f"predicted_{name}"] / row[f"measured_{name}"] - 1
        row[f"{name.removesuffix('_s').removesuffix('_bytes')}_error_share"] = share
    return {**asdict(case), **row}


def _trained(case: PlanCase, times: dict[str, int] | None, environment: dict[str, str]) -> Result:
    order = {"case": asdict(case), "times": times, "threads": torch.get_num_threads()}
    return measured_apart("atombench.engine.plan_case", order, case, environment)


def _summary(rows: Sequence[Result]) -> Result:
    step = [abs(row["step_error_share"]) for row in rows]
    device = [row["device_peak_error_share"] for row in rows]
    host = [row["host_peak_error_share"] for row in rows]
    return {
        "largest_step_error_share": max(step),
        "median_step_error_share": statistics.median(step),
        "steps_within_10_percent": sum(share <= 0.1 for share in step),
        "largest_device_peak_error_share": max(map(abs, device)),
        "least_device_peak_error_share": min(device),
        "largest_host_peak_error_share": max(map(abs, host)),
        "least_host_peak_error_share": min(host),
    }


def _sentence(row: dict[str, Any]) -> str:
    return (
        f"{row['layers']} layers of {row['width']}, bound by {row['bound']}: step "
        f"{format_seconds(row['predicted_step_s'])} predicted, "
        f"{format_seconds(row['measured_step_s'])} measured ({row['step_error_share']:+.1%}); "
        f"device {format_bytes(row['measured_device_peak_bytes'])} "
        f"({row['device_peak_error_share']:+.1%}), "
        f"host {format_bytes(row['measured_host_peak_bytes'])} "
        f"({row['host_peak_error_share']:+.1%})"
    )
