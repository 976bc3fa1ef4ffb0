"""Limits of time and memory for what a stranger's template does."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_MEMORY = Path("/proc/self/statm")
_NO_LIMIT = resource.RLIM_INFINITY


@contextlib.contextmanager
def bounded(file: str, most_s: float, more_bytes: int) -> Iterator[None]:
    """End what runs within after a time, and have allocations fail beyond some more memory.

    Args:
        file: What Python calls the file of the code that is watched; each of its lines looks at
            the clock.
        most_s: Seconds.
        more_bytes: Of address space, for the whole process meanwhile, beyond what it has (Linux).

    Raises:
        TimeoutError: the time is over.
        MemoryError: so much memory is not given.
    """
    until_s = time.monotonic() + most_s

    def look(frame: FrameType, *_: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if time.monotonic() > until_s:
            raise TimeoutError(f"it takes more than {most_s:g} s")
        return look

    before = sys.gettrace()
    with _memory_within(more_bytes):
        sys.settrace(look)
        try:
            yield
        finally:
            sys.settrace(before)


@contextlib.contextmanager
def _memory_within(more_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not _MEMORY.exists():
        yield
        return
    pages = int(_MEMORY.read_text().split()[0])
    wanted = pages * resource.getpagesize() + more_bytes
    limits = [limit for limit in (wanted, soft, hard) if limit != _NO_LIMIT]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
