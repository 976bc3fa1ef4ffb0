"""Measuring in a process of its own, and what of the host's memory is this process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atombench.common import Result
from atomtrain.errors import AtomError, ConfigError

_DEADLINE_S = 600.0
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that the resident set is what is held."""


class BenchmarkError(AtomError):
    """A process that measures failed or hung."""

    exit_code = 1


def measured_apart(
    module: str, order: Mapping[str, Any], what: object, environment: Mapping[str, str]
) -> Result:
    """Run `python -m MODULE ORDER`; return the JSON object that it prints last.

    Args:
        module: One that measures as its first argument says, in JSON.
        order: That argument.
        what: What is measured, for people.
        environment: Variables beside those of this process.

    Raises:
        BenchmarkError: the process failed or hung; names what was measured.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(order)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{what} did not end within {_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it left no message"]
        raise BenchmarkError(f"the process of {what} failed: {lines[-1]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def memory_bytes(field: str = "VmRSS") -> int:
    """Return a field of this process's memory; by default its resident set."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def forget_peak() -> None:
    """Let the kernel start a new peak of the resident set."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
