"""How a benchmark ends before its time: processes that it started end too, and results are kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM into the exception of Ctrl-C, so that what was started is ended as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def requests_noted() -> Iterator[Callable[[], bool]]:
    """Yield what says whether SIGINT or SIGTERM has come meanwhile.

    The first one does nothing else; the next one is a KeyboardInterrupt.
    """
    asked = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
