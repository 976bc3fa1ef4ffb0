"""What every operation of an engine stands on: executor and plan, their end, and failures.

A failure in a step leaves part of the model a step ahead of the rest, so it is remembered and
everything that would read the model refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from torch import nn

from atomtrain.analysis.trace import Traced
from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning.plan import Plan
from atomtrain.planning.rooms import host_gradients
from atomtrain.planning.schedule import Visit
from atomtrain.planning.several import share_of
from atomtrain.swapping.crew import Crew, Member, Together, executor_of
from atomtrain.swapping.executor import Executor
from atomtrain.swapping.model_state import ModelState
from atomtrain.swapping.planner import Planner
from atomtrain.swapping.precision import Masters, Part
from atomtrain.swapping.store import HostStore
from atomtrain.swapping.updates import Updates


class SegmentDone(NamedTuple):
    """A segment's visit that compute has been given in full."""

    phase: str
    """`forward`, `turn` (forward and backward at once), `backward`, or `evaluate`."""
    layers: tuple[str, ...]
    """Names of the segment's layers."""


class EngineBase:
    """Owns executor, host store and updates; not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        planner: Planner,
        plan: Plan,
        store: HostStore,
        members: Sequence[Member],
        updates: Updates,
        together: Together | None = None,
    ) -> None:
        """`members` are the devices; `together` is what several of them have in common."""
        self.model, self.plan = model, plan
        self.device = members[0].device
        """The first device."""
        self.devices = tuple(member.device for member in members)
        self._members, self._together = members, together
        self.on_segment: Callable[[SegmentDone], None] | None = None
        """Called after each segment's visit, in steps and evaluations, on the caller's thread; of
        several devices, after those of the first one. What it raises ends the step and the engine
        with it, as any other error in a step."""
        self._traced, self._store, self._updates = traced, store, updates
        self.planner = planner
        """What plans are made from: costs and times of the layers, rates of the machine."""
        present = None if updates.disk is None else updates.disk.present
        self.masters = Masters(updates.worker_of, present, self._wrote)
        """The parameters' values; call `synchronize` before."""
        self._state = ModelState(model, self.masters)
        self._broken: BaseException | None = None
        self._closed = False
        # Also when the caller forgets: a thread inside torch must not outlive the interpreter.
        self._release = weakref.finalize(self, _release, updates, members, together)
        try:
            self._executor: Executor | Crew | None = self._execute(plan)
        except BaseException:
            self._release()
            raise

    def synchronize(self) -> None:
        """Block until all updates are applied and the model on the host is current.

        Raises:
            StreamError: a transfer or update failed, or an earlier step did; then part of the
                model is a step ahead of the rest, and must not be taken for a model.
        """
        self._check_whole()
        if self._executor is None:  # closed: it was done before
            return
        with self._guarded():
            self._updates.wait()
            self._bring_to_host(range(self._store.layout.blocks), moments=True)
            self.device.synchronize()
            self._executor.buffers.to_host()

    def wait(self) -> None:
        """Block until all that the steps began is done: updates.

        For clocks; nothing may be written to the model without `synchronize`.

        Raises:
            StreamError: as of `synchronize`.
        """
        self._check_whole()
        with self._guarded():
            self._updates.wait()

    def close(self) -> None:
        """Finish pending updates; give back device memory, gradients and threads, at once.

        The model stays usable, and so do `state_dict` and `optimizer_state`, unless part of the
        state lies on disk. Leaving a `with` block closes the engine.
        """
        if self._closed:
            return
        try:
            if self._broken is None:
                self.synchronize()
        finally:
            self._closed = True
            try:
                self._release()  # first: copies may still be on their way to what goes now
            finally:
                self._executor = None  # and with it slots, gradient buffers and resident blocks
            for device in self.devices:
                device.trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _make_room(self, micro_batches: int) -> None:
        """Make a new plan if the step has more micro-batches than the plan was made for."""
        share = share_of(micro_batches, len(self.devices))
        if share <= self.plan.micro_batches:
            return
        plan = self.planner.plan(share, self.plan.on_disk)
        self.synchronize()
        with self._guarded():
            # The old slots must be gone before the new ones come, or both would count.
            self._executor = None
            self._executor = self._execute(plan)
            self.plan = plan

    def _bring_to_host(self, blocks: Iterable[int], *, moments: bool) -> None:
        if self._executor is not None:
            with self.device.computing():
                self._executor.slots.there.to_host(blocks, moments=moments)

    def _wrote_blocks(self, blocks: Iterable[int]) -> None:
        """Take note of what was written to the host's copies of parameters."""
        for block in blocks if self._executor is not None else ():
            self._running.slots.there.wrote(block, values=True)

    def _wrote(self, parameter: nn.Parameter, part: Part) -> None:
        """Take note of what was written to the host's copy of a parameter."""
        block, values = self._updates.block_of(parameter), part == "values"
        if self._executor is not None:
            self._executor.slots.there.wrote(block, values=values, moments=not values)

    @property
    def _running(self) -> Executor | Crew:
        if self._executor is None:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        return self._executor

    def _execute(self, plan: Plan) -> Executor | Crew:
        planner = self.planner
        if plan.spends:
            places = host_gradients(self._store.layout, plan.shape, spends=True)
            self._store.place_gradients(planner.chain, self.device, places)
        executor = executor_of(self._members, planner.costs, plan, self._together)
        engine = weakref.ref(self)  # no cycle, so that a forgotten engine goes at once

        def visited(visit: Visit) -> None:
            there = engine()
            if there is not None and there.on_segment is not None:
                layers = planner.chain.layers[slice(*visit.layers)]
                names = tuple(layer.name for layer in layers)
                there.on_segment(SegmentDone(visit.phase.value, names))

        executor.visited = visited
        return executor

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise StreamError(
                f"the engine failed earlier ({self._broken}); resume from the last checkpoint"
            ) from self._broken

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember a failure: half a step has run, so nothing after it would be right."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise


def _release(updates: Updates, members: Sequence[Member], together: Together | None) -> None:
    if together is not None:
        together.pool.shutdown()
    updates.close()
    for member in members:
        member.device.close()
    for member in members:  # last, since copies use what they hold
        member.store.close()
