"""A clock that moves when nothing else does: seconds take no time, and everything has one order."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen any more"
            self.now_s += max(timeout, 0)
        return events


class _Timer(asyncio.TimerHandle):
    """One of several for the same moment: the one that was set first comes first.

    asyncio's own order among them is that of a heap, which also holds timers that were cancelled.
    """

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.number) < (other.when(), other.number)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds take no time, and on which everything has one order."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._numbers = itertools.count()
        super().__init__(self._jumping)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(work: Callable[[], Awaitable[ResultT]], loop: VirtualLoop | None = None) -> ResultT:
    """Run a coroutine on a virtual clock."""
    loop = loop or VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


class InlineThread:
    """Stands in for the network thread: everything on the one loop."""

    def post(self, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    async def offload(self, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        return work(*args)
