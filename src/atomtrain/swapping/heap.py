"""The C library's heap, where it can be told what to do (glibc)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any


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
