"""Ctrl-C while packages are being imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process with exit code 130 on SIGINT, without raising.

    For imports only: a `KeyboardInterrupt` in the middle of one is swallowed by packages that try
    an import and go on without it, and comes out as an unrelated error. There is nothing to save
    yet. Does nothing outside the main thread, or where SIGINT is ignored.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(_INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
