"""Accesses to the same memory by several streams must be ordered by events, or by the host.

What is remembered of each range of bytes is each stream's last read and last write. It is compared
with what is known to come before a new access: so a missing event is found even in a run in which
nothing went wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.support.software_gpu.order import Clock, Task


class Range(NamedTuple):
    """Bytes from `low` up to `high`."""

    low: int
    high: int


class _Key(NamedTuple):
    stream: int
    writes: bool
    bytes: Range


class Accesses:
    """Who used a piece of memory."""

    def __init__(self, name: str, report: Callable[[str], None]) -> None:
        self._name, self._report = name, report
        self._last: dict[_Key, tuple[int, str]] = {}

    def note(self, task: Task, used: Range, what: str, *, writes: bool) -> None:
        """Take note of an access by a piece of work; report it if another one may be under way."""
        for key, (count, earlier) in list(self._last.items()):
            if not (writes or key.writes) or key.stream == task.queue.number:
                continue
            if key.bytes.low < used.high and used.low < key.bytes.high:
                if task.clock.get(key.stream, 0) < count:
                    self._report(
                        f"{self._name}: {what} on stream {task.queue.number} is not ordered "
                        f"after {earlier} on stream {key.stream}"
                    )
                elif writes and used.low <= key.bytes.low and key.bytes.high <= used.high:
                    del self._last[key]  # who comes after this comes after that
        number = task.queue.number
        self._last[_Key(number, writes, used)] = task.clock[number], what

    def allocated(self, owner: int, known: Clock, size: int) -> None:
        """Take note that the memory may be in use by what its stream was given before."""
        self._last[_Key(owner, True, Range(0, size))] = known.get(owner, 0), "its allocation"

    def check_freed(self, owner: int, known: Clock) -> None:
        """Report what may still use the memory when a later allocation of its stream gets it."""
        for key, (count, earlier) in self._last.items():
            if key.stream != owner and known.get(key.stream, 0) < count:
                self._report(
                    f"{self._name} was freed while {earlier} on stream {key.stream} may still "
                    f"use it, and stream {owner} may get its memory again"
                )
