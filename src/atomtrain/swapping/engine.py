"""The engine: runs the steps of a swapped model. `atomtrain.swap` opens it.

The caller's loop stays his own; parameters, gradients and optimizer state live on the host, and
the device holds no more than its budget.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.trace import MicroBatch, Traced
from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning.memory_map import Region, memory_map
from atomtrain.planning.plan import Plan
from atomtrain.planning.schedule import Visit
from atomtrain.planning.timeline import Span
from atomtrain.swapping.device import Device
from atomtrain.swapping.disk_placement import DiskTraffic
from atomtrain.swapping.executor import Executor
from atomtrain.swapping.fragments import Fragment, element_bytes, fragment_ranges
from atomtrain.swapping.loss_scale import LossScale
from atomtrain.swapping.model_state import ModelState
from atomtrain.swapping.planner import Planner
from atomtrain.swapping.precision import Masters, Part
from atomtrain.swapping.store import HostStore
from atomtrain.swapping.tracing import Record
from atomtrain.swapping.updates import Updates


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step took."""

    loss: float
    step_s: float
    link_wait_s: float
    """Time that compute waited for the link or for host updates."""
    device_peak_bytes: int


class SegmentDone(NamedTuple):
    """A segment's visit that compute has been given in full."""

    phase: str
    """`forward`, `turn` (forward and backward at once), `backward`, or `evaluate`."""
    layers: tuple[str, ...]
    """Names of the segment's layers."""


class Engine:
    """Trains a swapped model. Not thread-safe: one thread drives it.

    `optimizer` is the optimizer of all parameters, for schedulers: its hyperparameters are read
    when a step begins. Its state lives in the engine (`optimizer_state`).
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        planner: Planner,
        plan: Plan,
        store: HostStore,
        device: Device,
        updates: Updates,
    ) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.last: StepReport | None = None
        self.recording = False
        """Whether steps note what each stream does, for `last_spans`."""
        self.on_segment: Callable[[SegmentDone], None] | None = None
        """Called after each segment's visit, in steps and evaluations, on the caller's thread. What
        it raises ends the step and the engine with it, as any other error in a step."""
        self._record: Record | None = None
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
        self._release = weakref.finalize(self, _release, updates, device)
        try:
            self._executor: Executor | None = self._execute(plan)
        except BaseException:
            self._release()
            raise

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made; a scheduler may change its learning rate."""
        return self._updates.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; `None` without clipping."""
        with self._guarded():
            self._updates.wait()
        return self._updates.gradient_norm

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run one optimizer step over the micro-batches; return their mean loss.

        Each micro-batch's loss is divided by their number before its backward. Blocks until the
        loss is known; updates go on in the background and overlap the next step.

        Raises:
            ConfigError: no micro-batch, or one that lacks an input or has another shape.
            DeviceMemoryError: a micro-batch larger than the example exceeded the budget.
            PlanError: more micro-batches than before, and no plan for them fits.
            DiskError: the disk failed to write in an earlier step; nothing of this one was done,
                and everything can still be read and saved.
            StreamError: a transfer or update failed, now or in an earlier step.
        """
        batches = self._begin(micro_batches)
        self._updates.require_disk()
        self._traced.ready(True)
        self._make_room(len(batches))
        started_s = time.perf_counter()
        self.device.reset_peak()
        with self._guarded(), self.device.computing(), self._recorded():
            losses = self._running.train(batches)
            loss = _mean(losses)
            del losses
        self.device.synchronize()
        self.last = StepReport(
            loss=loss,
            step_s=time.perf_counter() - started_s,
            link_wait_s=self.device.take_wait_s(),
            device_peak_bytes=self.device.peak_bytes(),
        )
        return loss

    @property
    def loss_scale(self) -> LossScale | None:
        """By what the loss is multiplied, and how many steps were skipped; `None` but in float16.

        Waits until the last step has decided; `LossScale.state` and `load_state` save and restore.
        """
        with self._guarded():
            self._updates.scale_of_loss()
        return self._updates.loss_scale

    def last_spans(self) -> tuple[Span, ...]:
        """Return what each stream did in the last step, in seconds from any common zero.

        Blocks until the step's updates are done. Empty unless `recording` was set before the step.
        """
        self._check_whole()
        with self._guarded():
            self._updates.wait()
        return () if self._record is None else self._record.spans()

    def predicted_spans(self) -> tuple[Span, ...]:
        """Return what the plan expects each stream to do in a step."""
        return self.planner.spans(self.plan)

    @property
    def disk(self) -> DiskTraffic | None:
        """What went to and from the disk so far; `None` if nothing lies there."""
        disk = self._updates.disk
        return None if disk is None else disk.traffic

    def memory_map(self) -> list[Region]:
        """Return where the plan's memory goes, on host and device."""
        planner = self.planner
        state_bytes = self.state_bytes - self._store.layout.arena_bytes
        if self._updates.disk is not None:
            state_bytes -= self._updates.disk.use.saved_state_bytes
        return memory_map(planner.chain, self.plan, state_bytes)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the mean loss over the micro-batches, in evaluation mode; nothing is updated.

        Raises:
            AnalysisError: what the model does in evaluation does not fit its layers in training.
        """
        batches = self._begin(micro_batches)
        with self._guarded():
            # Exporting what the model does in evaluation switches flags that all threads see, so
            # no optimizer may run meanwhile.
            self._updates.wait()
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            self._traced.ready(False)
            with self._guarded(), self.device.computing():
                losses: list[Tensor] = []
                most = self.plan.micro_batches
                for first in range(0, len(batches), most):
                    losses += self._running.evaluate(batches[first : first + most])
                loss = _mean(losses)
                del losses
            self.device.take_wait_s()
            return loss
        finally:
            for module, mode in training.items():
                module.training = mode

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

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers under the model's own names.

        They share the host's memory, but for bfloat16 parameters with masters: of those it has the
        masters, as float32, which share memory or not as the optimizer keeps them. Read only.
        """
        self.synchronize()
        return self._state.parameters_and_buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace parameters (masters included) and buffers; names and shapes must match."""
        self.synchronize()
        self._state.set_parameters_and_buffers(state)
        self._wrote_blocks(range(self._store.layout.blocks))
        self.refresh_buffers()

    def refresh_buffers(self) -> None:
        """Bring the model's buffers to the device again, after they were changed on the host."""
        if self._executor is not None:
            self._executor.buffers.from_host()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, such as `exp_avg`; shares memory.

        Masters are no part of it: `state_dict` has them.
        """
        self.synchronize()
        return self._state.moments()

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer state by parameter name."""
        self.synchronize()
        self._state.set_moments(state)

    @property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return sum(parameter.numel() for parameter in self.planner.chain.parameters)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state, wherever they lie.

        The state of an optimizer that does not tell is taken for two moments of the parameters'
        type.
        """
        taken = self.planner.updates
        assert taken is not None
        return self._store.layout.arena_bytes + taken.host_bytes - taken.scratch_bytes

    def layers(self) -> dict[str, list[str]]:
        """Return the names of the parameters by layer; a shared weight is with its first layer."""
        names = self.planner.chain.names
        seen: set[int] = set()
        layers: dict[str, list[str]] = {}
        for layer in self.planner.chain.layers:
            fresh = {id(p): names[id(p)] for p in layer.parameters.values() if id(p) not in seen}
            seen.update(fresh)
            layers[layer.name] = list(fresh.values())
        return layers

    def fragment_ranges(self) -> list[tuple[int, int]]:
        """Divide what is trained into fragments of whole layers, a few MB to 64 MB each.

        The result depends only on the model, so all peers of a run divide alike.

        Returns:
            Byte ranges of the host's gradients, in order and without gaps. Where nothing is frozen
            those of the parameters are the same.
        """
        return fragment_ranges(self._store.layout.gradients)

    @contextmanager
    def fragment(self, start_bytes: int, stop_bytes: int) -> Iterator[Tensor]:
        """Give exclusive access to the trainable parameters of a range, between two steps.

        Yields:
            1-D float32; what is written there is what the next step uses. A view of the host store,
            or, for a model of bfloat16 or with frozen parameters, a copy that is written back at
            the end.

        Raises:
            ConfigError: the trainable parameters are not all float32, nor all bfloat16.
        """
        self._check_whole()
        with self._guarded():
            blocks = self._updates.wait_for_range(start_bytes, stop_bytes)
            self._bring_to_host(blocks, moments=False)
        store, chain = self._store, self.planner.chain
        fragment = Fragment(chain, store.layout, store.parameters, start_bytes, stop_bytes)
        with fragment.view(self.masters) as values:
            yield values
        self._wrote_blocks(blocks)

    def fragment_places(self, start_bytes: int, stop_bytes: int) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters of a range of the host's parameters, each with its first element.

        Raises:
            ConfigError: the model's parameters are not all float32, nor all bfloat16.
        """
        store = self._store
        return Fragment(
            self.planner.chain, store.layout, store.parameters, start_bytes, stop_bytes
        ).places

    @property
    def element_bytes(self) -> int:
        """Bytes of a trainable parameter in the host store: 4 of float32, 2 of bfloat16.

        Raises:
            ConfigError: the trainable parameters are not all of one of the two.
        """
        return element_bytes(self.planner.chain)

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
            self._executor = None  # and with it slots, gradient buffers and resident blocks
            self._release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        if self._closed:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        self._check_whole()
        if isinstance(micro_batches, Tensor | Mapping) or len(micro_batches) == 0:
            raise ConfigError("give a list of at least one micro-batch: engine.step([batch])")
        return [self._traced.bind(micro_batch) for micro_batch in micro_batches]

    def _make_room(self, micro_batches: int) -> None:
        """Make a new plan if the step has more micro-batches than the plan was made for."""
        if micro_batches <= self.plan.micro_batches:
            return
        plan = self.planner.plan(micro_batches, self.plan.on_disk)
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
    def _running(self) -> Executor:
        if self._executor is None:
            raise ConfigError("the engine is closed; call atomtrain.swap again")
        return self._executor

    def _execute(self, plan: Plan) -> Executor:
        planner = self.planner
        with self.device.computing():
            executor = Executor(
                planner.chain, planner.costs, plan, self._store, self.device, self._updates
            )
        engine = weakref.ref(self)  # no cycle, so that a forgotten engine goes at once

        def visited(visit: Visit) -> None:
            there = engine()
            if there is not None and there.on_segment is not None:
                layers = planner.chain.layers[slice(*visit.layers)]
                names = tuple(layer.name for layer in layers)
                there.on_segment(SegmentDone(visit.phase.value, names))

        executor.visited = visited
        return executor

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Let the streams note what they do in this step, if that is wanted."""
        self._record = self.device.new_record() if self.recording else None
        device = self.device
        holders = (device.load, device.fetch, device.unload, device.save, *self._updates.streams)
        for holder in holders:
            holder.record = self._record
        self._running.record = self._record
        try:
            yield
        finally:
            for holder in holders:
                holder.record = None
            self._running.record = None

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


def _release(updates: Updates, device: Device) -> None:
    updates.close()
    device.close()


def _mean(losses: Sequence[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)
