"""State on disk against state in memory: resident set, step time, bytes written.

For each precision and each choice of what is on disk, a process of its own trains a GPT on the
emulated device and reads its resident set; what the device holds and what was there before are
taken off. Time is that of whole steps, updates and disk included, one after the other. Both are
compared with what the plan says, whose rates are measured on the same machine. Losses must be the
same bits whatever is on disk.

The disk is that of temporary files (`TMPDIR`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.disk_case import DiskCase
from atombench.engine.plan import BenchmarkError
from atomtrain.engine.calibration.disk_profile import measured_rates
from atomtrain.units import format_bytes, format_seconds

_DEADLINE_S = 600.0
_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that the resident set is what is held."""
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
    done = subprocess.run(
        [sys.executable, "-m", "atombench.engine.disk_case", json.dumps(order)],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        env={**os.environ, **_EXACT_MEMORY},
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchmarkError(f"measuring {precision} with {on_disk} on disk failed: {last}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result
