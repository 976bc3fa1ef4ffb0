"""How far work that takes long has come, for somebody who sits and waits.

Who does such work says so with `Progress`; who shows it calls `listening`. Without a listener
nothing is told, and no thread is started.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Self, TypeVar

from atomtrain.units import format_bytes, format_count, format_seconds

BYTES = "bytes"
"""A unit whose amounts are written as sizes."""
QUIET_S = 2.0
"""What takes less is not told."""
EVERY_S = 1.0

Item = TypeVar("Item")
Show = Callable[[str], None]
_listeners: list[Show] = []
_under_way: list[Progress] = []
"""The last one is told: what it is a part of waits for it."""


@contextmanager
def listening(show: Show) -> Iterator[None]:
    """Have the progress of what is done inside shown.

    Args:
        show: Gets a line every second from a thread, and `""` when there is nothing to show any
            more; nothing once this is over.
    """
    _listeners.append(show)
    before = len(_under_way)
    try:
        yield
    finally:
        _listeners.pop()
        # A generator that an error left unfinished lives as long as the error.
        for left in reversed(_under_way[before:]):
            left.end()


class Progress:
    """Tells how far one piece of work has come, from its third second on."""

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        """Begin with `with`.

        Args:
            what: Such as "reading weights".
            total: What there is to do, in `unit`; `None` if that is not known.
            unit: Of what `advance` is given, such as "rows" or `BYTES`.
        """
        self._what, self._total, self._unit = what, total, unit
        self._done = 0.0
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begin; with a listener a thread tells it from now and then."""
        _under_way.append(self)
        if _listeners:
            self._thread = threading.Thread(
                target=self._tell, args=(_listeners[-1],), name="atom-progress", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Tell nothing any more; a second call does nothing."""
        if self in _under_way:
            _under_way.remove(self)
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def advance(self, amount: float = 1) -> None:
        """Count what has been done since the last call."""
        self._done += amount

    def line(self, passed_s: float) -> str:
        """Return what there is to tell after so many seconds."""
        if not self._done:
            return f"{self._what}: {_seconds(passed_s)}"
        rate = self._done / passed_s
        if self._total is None:
            return f"{self._what}: {self._amount(self._done)}, {self._amount(rate)}/s"
        left_s = max(0.0, self._total - self._done) / rate
        return (
            f"{self._what}: {self._amount(self._done, '')} of {self._amount(self._total)} "
            f"({min(1.0, self._done / self._total):.0%}), {self._amount(rate)}/s, "
            f"{_seconds(left_s)} left"
        )

    def _amount(self, value: float, unit: str | None = None) -> str:
        if self._unit == BYTES:
            return format_bytes(value)
        count = format_count(round(value, 1 if value < 10 else None))
        return f"{count} {self._unit if unit is None else unit}".rstrip()

    def _tell(self, show: Show) -> None:
        wait_s, told = QUIET_S, False
        while not self._over.wait(wait_s):
            wait_s = EVERY_S
            if _under_way and _under_way[-1] is self:
                told = True
                show(self.line(time.monotonic() - self._began_s))
        if told:
            show("")


def each(what: str, items: Iterable[Item], unit: str) -> Iterator[Item]:
    """Yield items, and tell how many of them are done, of how many if they have a length."""
    total = len(items) if isinstance(items, Sized) else None
    with Progress(what, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()


def _seconds(value_s: float) -> str:
    return f"{max(1.0, value_s):.0f} s" if value_s < 60 else format_seconds(value_s)
