"""The engine's core: owns executor, host store and updates, and refuses to go on after a failure.

A failure in a step leaves part of the model a step ahead of the rest, so it is remembered and
everything that would read the model refuses.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from atomtrain.analysis.costs.costs import layer_costs
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.devices.streams import Record
from atomtrain.engine.execution.determinism import told_plainly
from atomtrain.engine.execution.executor import Executor
from atomtrain.engine.execution.multi_device import (
    Member,
    MultiDeviceExecutor,
    SharedByDevices,
    executor_of,
)
from atomtrain.engine.planner import Planner
from atomtrain.engine.state.kept_parameters import KeptParameters
from atomtrain.engine.state.precision import Masters, Part
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.state.whole_optimizer import WholeOptimizer
from atomtrain.engine.updates.optimizer import gather_counts
from atomtrain.engine.updates.updates import Combining, Updates
from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning.plan.layout import host_gradients
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Visit
from atomtrain.planning.plan.updating import share_of


class SegmentDone(NamedTuple):
    """A segment's visit that compute has been given in full."""

    phase: str
    """`forward`, `turn` (forward and backward at once), `backward`, or `evaluate`."""
    layers: tuple[str, ...]
    """Names of the segment's layers."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step took."""

    loss: float
    step_s: float
    link_wait_s: float
    """Time that compute waited for the link or for host updates; the longest of several devices."""
    device_peak_bytes: int
    """The highest of several devices."""
    device_reserved_bytes: int
    """Most that the allocator had taken from the device, which is more than was in use."""
    allocation_retries: int
    """How often the allocator gave memory back and waited; of all devices. More than 0 is slow."""


class EngineCore:
    """Owns executor, host store and updates; not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        plan: Plan,
        store: HostStore,
        members: Sequence[Member],
        updates: Updates,
        shared: SharedByDevices | None = None,
    ) -> None:
        """`members` are the devices; `shared` is what several of them have in common."""
        self.model, self.plan = model, plan
        self.devices = tuple(member.device for member in members)
        self.members, self._shared = members, shared
        self.on_segment: Callable[[SegmentDone], None] | None = None
        """Called after each segment's visit."""
        self.planner, self.store, self.updates = planner, store, updates
        present = None if updates.disk is None else updates.disk.present
        self.masters = Masters(updates.worker_of, present, self._wrote)
        """The parameters' values; call `synchronize` before."""
        self.kept = KeptParameters(planner.chain, model, move="parameters" in plan.on_disk)
        """The parameters, as callers must leave them."""
        there = weakref.ref(self)

        def synchronize() -> None:
            if (core := there()) is not None:
                core.synchronize()

        self.whole = WholeOptimizer(
            updates.optimizer, self.masters, planner.chain.names, synchronize
        )
        """The optimizer of all parameters."""
        self.counted: dict[tuple[int, str], Any] = {}
        """What the optimizer has changed in its groups by itself, by number and key."""
        self._broken: BaseException | None = None
        self.closed = False
        self.undo = contextlib.ExitStack()
        """What ends with the engine: it is closed when the engine is, or forgotten."""
        # Also when the caller forgets: a thread inside torch must not outlive the interpreter.
        self._release = weakref.finalize(self, _release, updates, members, shared, self.undo)
        try:
            self.executor: Executor | MultiDeviceExecutor | None = self._execute(plan)
        except BaseException:
            self._release()
            raise

    def synchronize(self) -> None:
        """See `Engine.synchronize`."""
        self.check_whole()
        if self.executor is None:  # closed: it was done before
            return
        with self.guarded():
            self.updates.wait()
            self.bring_to_host(range(self.store.layout.blocks), moments=True)
            self.devices[0].synchronize()
            self.executor.buffers.to_host()
        workers = [*self.updates.workers, *self.executor.slots.there.workers]
        self.counted.update(gather_counts(self.updates.optimizer, workers))
        self.whole.hand_over()

    def wait(self) -> None:
        """See `Engine.wait`."""
        self.check_whole()
        with self.guarded():
            self.updates.wait()

    def close(self) -> None:
        """See `Engine.close`."""
        if self.closed:
            return
        try:
            if self._broken is None:
                self.synchronize()
        finally:
            self.closed = True
            try:
                self._release()  # first: copies may still be on their way to what goes now
            finally:
                self.executor = None  # and with it slots, gradient buffers and resident blocks
            for device in self.devices:
                device.trim()

    def make_room(self, micro_batches: int) -> None:
        """Make a new plan if the step has more micro-batches than the plan was made for."""
        share = share_of(micro_batches, len(self.devices))
        if share > self.plan.micro_batches:
            self._follow(self.planner, share)

    def measure_again(self, inputs: Mapping[str, Any]) -> None:
        """Make a new plan for a micro-batch whose images are larger than those measured before.

        Raises:
            ConfigError: layers are compiled, whose costs are measured when they are.
            PlanError: no plan fits.
        """
        planner = self.planner
        if planner.compiling.compiled:
            raise ConfigError(
                "the images of a micro-batch are larger than those of the example, and layers are "
                "compiled; swap the model with its largest images as the example"
            )
        self.synchronize()
        device = self.devices[0].torch_device
        self._follow(
            planner.with_costs(layer_costs(planner.chain, inputs, device)), self.plan.micro_batches
        )

    def measure_random(self, inputs: Mapping[str, Any]) -> None:
        """Make a new plan if a layer draws random numbers or changes buffers that did not before.

        Raises:
            ConfigError: layers are compiled.
            PlanError: no plan fits.
        """
        planner = self.planner
        self.synchronize()
        costs = layer_costs(planner.chain, inputs, self.devices[0].torch_device)
        for old, new in zip(planner.costs.layers, costs.layers, strict=True):
            if new.random <= old.random and new.changes_buffers <= old.changes_buffers:
                continue
            if planner.compiling.compiled or len(self.devices) > 1:
                raise ConfigError(
                    f"layer {new.name!r} draws random numbers or changes buffers now, and did not "
                    "when the model was swapped; swap it again"
                )
            self._follow(planner.with_costs(costs), self.plan.micro_batches)
            return

    def _follow(self, planner: Planner, micro_batches: int) -> None:
        """Make a new plan, and go on by it."""
        plan = planner.plan(micro_batches, self.plan.on_disk)
        self.synchronize()
        with self.guarded():
            # The old slots must be gone before the new ones come, or both would count.
            self.executor = None
            self.planner = planner
            self.executor = self._execute(plan)
            self.plan = plan

    def plan_by(self, measure: Callable[[], Profile], faster: float) -> bool:
        """Measure again between two steps; return whether that brought another plan.

        The device is idle and empty meanwhile. All plans have the same bits, but for the order in
        which micro-batches add to a weight that several layers share: a plan with another order is
        not taken, nor one that is not `faster` by so much.

        Args:
            measure: Takes the profile; what it raises changes nothing.
            faster: Ratio of the times that are predicted now, of the plan in use and of the other.
        """
        with self.lending():
            with torch.random.fork_rng([]):
                planner = self.planner.measured_again(measure())
            plan = planner.timed(self.plan)
            found = planner.plan(plan.micro_batches, plan.on_disk)
            shared = [one.users for one in self.store.layout.shared]
            alike = plan.micro_batches == 1 or plan.shape.joins(shared) == found.shape.joins(shared)
            changes = alike and planner.timed(found).step_s * faster <= plan.step_s
            self.planner, self.plan = planner, found if changes else plan
        return changes

    def combine_gradients(self, combine: Combining) -> None:
        """See `Engine.combine_gradients`."""
        if len(self.devices) > 1:
            raise ConfigError(
                f"gradients of {len(self.devices)} devices are already added up by the engine; "
                "combine those of engines with one device each"
            )
        if self.planner.options.optimizer_on_device is not False:
            raise ConfigError(
                "gradients are combined on the host, where all blocks have to be updated; give "
                "Options(optimizer_on_device=False)"
            )
        if self.plan.spends:
            raise ConfigError(
                "gradients that share staging buffers on the host cannot wait there to be "
                "combined; leave out spend_gradients"
            )
        if not self.store.keeps_gradients:
            name = self.devices[0].name
            raise ConfigError(
                f"gradients are not gathered on the host where the device is {name!r}; "
                "choose one with memory of its own, such as 'emulated'"
            )
        self.updates.combining = combine

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Give the devices' memory to somebody else, between two steps.

        Raises:
            ConfigError: the engine is closed.
        """
        self.synchronize()
        if self.executor is None:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        if self.devices[0].one_memory:
            yield
            return
        with self.guarded():
            self.executor = None
        for device in self.devices:
            device.trim()
        try:
            yield
        except BaseException as error:
            # What waits in the frames of what failed would take the memory that comes back.
            failed: BaseException | None = error
            while failed is not None:
                traceback.clear_frames(failed.__traceback__)
                failed = failed.__cause__
            raise
        finally:
            with self.guarded():
                self.executor = self._execute(self.plan)

    def bring_to_host(self, blocks: Iterable[int], *, moments: bool) -> None:
        """Bring the host's copies of blocks that are updated on the device up to date."""
        if self.executor is not None:
            with self.devices[0].computing():
                self.executor.slots.there.to_host(blocks, moments=moments)

    def wrote_blocks(self, blocks: Iterable[int]) -> None:
        """Take note of what was written to the host's copies of parameters."""
        for block in blocks if self.executor is not None else ():
            self.running.slots.there.wrote(block, values=True)

    def _wrote(self, parameter: nn.Parameter, part: Part) -> None:
        """Take note of what was written to the host's copy of a parameter."""
        block, values = self.updates.block_of(parameter), part == "values"
        if self.executor is not None:
            self.executor.slots.there.wrote(block, values=values, moments=not values)

    @property
    def running(self) -> Executor | MultiDeviceExecutor:
        """What runs the plan.

        Raises:
            ConfigError: the engine is closed.
        """
        if self.executor is None:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        return self.executor

    def _execute(self, plan: Plan) -> Executor | MultiDeviceExecutor:
        planner = self.planner
        if plan.spends:
            places = host_gradients(self.store.layout, plan.shape, spends=True)
            self.store.place_gradients(planner.chain, self.devices[0], places)
        executor = executor_of(self.members, planner.costs, plan, self._shared)
        core = weakref.ref(self)  # no cycle, so that a forgotten engine goes at once

        def visited(visit: Visit) -> None:
            there = core()
            if there is not None and there.on_segment is not None:
                layers = planner.chain.layers[slice(*visit.layers)]
                names = tuple(layer.name for layer in layers)
                there.on_segment(SegmentDone(visit.phase.value, names))

        executor.visited = visited
        return executor

    def check_whole(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            StreamError: says what failed.
        """
        if self._broken is not None:
            raise StreamError(
                f"the engine failed earlier ({self._broken}); resume from the last checkpoint"
            ) from self._broken

    @contextmanager
    def noting(self, record: Record | None) -> Iterator[None]:
        """Let the streams note what they do in a step, if there is a record."""
        device = self.devices[0]
        streams = (device.load, device.fetch, device.unload, device.save, *self.updates.streams)
        holders = (*streams, self.running)
        for holder in holders:
            holder.record = record
        try:
            yield
        finally:
            for holder in holders:
                holder.record = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the model's modules in evaluation mode, then as they were."""
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Remember a failure: half a step has run, so nothing after it would be right."""
        try:
            with told_plainly():
                yield
        except BaseException as error:
            self._broken = error
            raise


def _release(
    updates: Updates,
    members: Sequence[Member],
    shared: SharedByDevices | None,
    undo: contextlib.ExitStack,
) -> None:
    # Python may free a forgotten engine in the midst of anything, such as tracing another model.
    with undo, _disable_current_modes():
        _release_all(updates, members, shared)


def _release_all(
    updates: Updates, members: Sequence[Member], shared: SharedByDevices | None
) -> None:
    if shared is not None:
        shared.pool.shutdown()
    updates.close()
    for member in members:
        member.device.close()
    for member in members:  # last, since copies use what they hold
        member.store.close()
