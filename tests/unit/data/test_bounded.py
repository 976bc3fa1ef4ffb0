"""What a template does has limits, and all is as before afterwards."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from atomtrain.data.chat import bounded


def run(code: str) -> None:
    exec(compile(code, "<template>", "exec"), {})


def test_what_does_not_end_is_ended() -> None:
    before = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(TimeoutError, match="more than 0 s"), bounded("<template>", 0.0, 1 << 30):
        run("while True: pass")
    assert before == (sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS))


def test_memory_beyond_is_not_given() -> None:
    """In a new process: this one may hold a gigabyte that is free, and need not ask for more."""
    code = """
from atomtrain.data.chat import bounded
with bounded("<template>", 60.0, 64 << 20):
    exec(compile("'a' * (1 << 20)", "<template>", "exec"), {})
try:
    with bounded("<template>", 60.0, 64 << 20):
        exec(compile("'a' * (1 << 30)", "<template>", "exec"), {})
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr
