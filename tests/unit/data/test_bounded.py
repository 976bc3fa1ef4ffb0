"""What a template does has limits, and all is as before afterwards."""

from __future__ import annotations

import resource
import sys

import pytest

from atomtrain.data.bounded import bounded


def run(code: str) -> None:
    exec(compile(code, "<template>", "exec"), {})


def test_what_does_not_end_is_ended() -> None:
    before = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(TimeoutError, match="more than 0 s"), bounded("<template>", 0.0, 1 << 30):
        run("while True: pass")
    assert before == (sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS))


def test_memory_beyond_is_not_given() -> None:
    with pytest.raises(MemoryError), bounded("<template>", 60.0, 64 << 20):
        run("'a' * (1 << 30)")
    with bounded("<template>", 60.0, 64 << 20):
        run("'a' * (1 << 20)")
