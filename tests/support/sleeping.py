"""Machines that sleep, on a virtual clock: what runs on one stands still, others go on."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atombench.virtual.clock import VirtualLoop

ResultT = TypeVar("ResultT")
_EARLY_S = 1e-9


class Machine:
    """A computer that sleeps and wakes; whatever a task on it starts is on it, too."""

    def __init__(self, *, clock_stops: bool) -> None:
        """`clock_stops`: its loop's clock stands still while it sleeps, as Linux' monotonic clock
        does while a lid is closed, and does not while a process is stopped."""
        self._clock_stops = clock_stops
        self.asleep = False
        self.lost_s = 0.0
        """By how much its loop's clock is behind."""
        self._slept_at_s = 0.0
        self._held: list[Callable[[], None]] = []

    def sleep(self) -> None:
        """Nothing happens here from now on."""
        self.asleep = True
        self._slept_at_s = _loop().true_s()

    def wake(self) -> None:
        """Go on: first with what has become due meanwhile."""
        self.asleep = False
        if self._clock_stops:
            self.lost_s += _loop().true_s() - self._slept_at_s
        held, self._held = self._held, []
        for fire in held:
            fire()

    def hold(self, fire: Callable[[], None]) -> None:
        """Call `fire` when it wakes."""
        self._held.append(fire)


_MACHINE: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


class SleepyLoop(VirtualLoop):
    """A virtual clock on which machines may sleep; `time` is that of the machine that asks."""

    def true_s(self) -> float:
        """Return the time that no sleep stops."""
        return super().time()

    def time(self) -> float:
        machine = _MACHINE.get()
        return super().time() - (machine.lost_s if machine else 0.0)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        if _machine_of(context) is None:
            return super().call_soon(callback, *args, context=context)
        return self._on_machine(super().call_soon, None, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        machine = _machine_of(context)
        if machine is None:
            return super().call_at(when, callback, *args, context=context)

        def later(fire: Callable[[], None], *, context: Any) -> asyncio.TimerHandle:
            return super(SleepyLoop, self).call_at(when + machine.lost_s, fire, context=context)

        return self._on_machine(later, when, callback, args, context)

    def _on_machine(
        self, start: Any, when: float | None, callback: Any, args: tuple[Any, ...], context: Any
    ) -> Any:
        """Start what calls `callback` when its machine is awake, and not before `when` there."""
        machine = _machine_of(context)
        assert machine is not None
        context = context or contextvars.copy_context()

        def fire() -> None:
            if handle.cancelled():
                return
            if machine.asleep:
                machine.hold(again)
            elif when is not None and self.true_s() - machine.lost_s < when - _EARLY_S:
                again()
            else:
                callback(*args)

        def again() -> None:
            if when is None:
                super(SleepyLoop, self).call_soon(fire, context=context)
            else:
                due_s = max(when + machine.lost_s, self.true_s())
                super(SleepyLoop, self).call_at(due_s, fire, context=context)

        handle = start(fire, context=context)
        return handle


async def on(machine: Machine, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Do something on a machine; what it leaves running stays there."""
    context = contextvars.copy_context()
    context.run(_MACHINE.set, machine)
    return await asyncio.get_running_loop().create_task(work, context=context)


def _loop() -> SleepyLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SleepyLoop)
    return loop


def _machine_of(context: contextvars.Context | None) -> Machine | None:
    return _MACHINE.get() if context is None else context.get(_MACHINE)
