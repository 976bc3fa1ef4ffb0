"""The C library's heap, where it can be told what to do (glibc)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_THRESHOLD, _MOST_MMAP_BYTES = 2**31 - 1, 32 << 20
"""What `mallopt` allows."""


def keep_freed() -> bool:
    """Have the process keep what it frees, up to 32 MiB at a time, as a GPU's allocator does.

    Otherwise the system takes memory back and fills it with zeros anew, over and over. Returns
    whether the library could be told.
    """
    with contextlib.suppress(OSError, AttributeError):
        tell = ctypes.CDLL(None).mallopt
        kept = tell(_M_TRIM_THRESHOLD, _MOST_THRESHOLD), tell(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)
        return all(kept)
    return False


def give_back() -> None:
    """Give all freed memory back to the system now.

    The library does so only with what is free at the heap's end, or was large. Of many tensors that
    went one by one it would keep most.
    """
    if (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).malloc_trim
    return None
