"""Host optimizer: each block is updated as soon as its gradient is complete, on its own thread.

A *block* is a layer's own parameters, or one weight that several layers share. Updates overlap
everything except the next load of the same block, which waits for the block's event. So they run
into the next step, yet no gradient is ever stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.streams import Event, Inject, Stream, finished
from atomtrain.engine.state.disk_parameters import Placement
from atomtrain.engine.state.disk_state import DiskState
from atomtrain.engine.state.gradients import GradientTracker
from atomtrain.engine.state.precision import LossScale
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.updates.grad_clipping import Decision, GradClipping
from atomtrain.engine.updates.optimizer import set_hyperparameters, tell_scaling, worker_for
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.shape import Layers

Combining = Callable[[Tensor, Sequence[Event]], Event]
"""See `Engine.combine_gradients`."""


class Updates:
    """Owns the optimizer state and the thread that applies it."""

    def __init__(
        self,
        chain: Chain,
        store: HostStore,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
        placement: Placement | None = None,
        guard: AbstractContextManager[Any] | None = None,
        inject: Inject | None = None,
        stream_type: type[Stream] = Stream,
    ) -> None:
        """Open the streams.

        Args:
            chain: Whose parameters are updated.
            store: Where they are.
            optimizer: That of all parameters; its state stays empty.
            clip_norm: Most global norm of a step's gradients; `None` does not clip.
            loss_scale: By what the loss is multiplied; `None` is 1.
            placement: What of the state lies on disk; `None` is nothing.
            guard: Optimizers run within it.
            inject: Called before each job of each stream; for tests.
            stream_type: Of the stream that updates run on.
        """
        layout = store.layout
        self.optimizer = optimizer
        self._store = store
        self._blocks = _blocks(chain, layout)
        self._block_of = {id(p): b for b, members in enumerate(self._blocks) for p in members}
        self._offsets = layout.gradients.offsets
        # As forward wants them; a shared weight is wanted by its first user.
        self._order = sorted(range(layout.blocks), key=lambda block: layout.users(block)[0])
        self._guard = guard or nullcontext()
        self._workers = [self.restricted(block) for block in range(len(self._blocks))]
        self._owners = {
            id(parameter): worker
            for worker in self._workers
            if worker is not None
            for group in worker.param_groups
            for parameter in group["params"]
        }
        self.disk: DiskState | None = None
        if placement is not None:
            self.disk = DiskState(placement, self._blocks, self.worker_of, store, inject)
        trained = [p for p in _in_model_order(chain) if p.requires_grad]
        self.clipping = GradClipping(trained, clip_norm, loss_scale)
        """What all gradients of a step together decide."""
        self.stream = stream_type("update", inject)
        # Schedulers warn unless `step` of this very object was called; its workers' is.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.updated: list[Event] = [finished() for _ in self._blocks]
        self.on_device: frozenset[int] = frozenset()
        """Blocks that are updated there, not here."""
        self.combining: Combining | None = None
        """What is done to each block's gradient before its update."""
        self.hyperparameters: Sequence[Mapping[str, Any]] = []
        """Of each group, as they were when the step began."""
        self._tracker = GradientTracker(self._blocks)
        self._labels = [""] * len(self._blocks)

    def begin_step(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step in which these segments deliver gradients of these blocks."""
        self._tracker.begin(deliveries)
        self.clipping.begin()
        # Read now, on the caller's thread: a scheduler may change them while updates still run.
        self.hyperparameters = [
            {key: _as_now(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        if self.disk is not None:
            self.disk.begin(self._expected(deliveries))

    @property
    def whole(self) -> Updates:
        """These: all gradients are delivered here."""
        return self

    @property
    def blocks(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters of each block."""
        return self._blocks

    @property
    def touched(self) -> set[int]:
        """The parameters that have gradients in this step, by `id`; its jobs may add to it."""
        return self._tracker.touched

    def members(self, block: int) -> Sequence[nn.Parameter]:
        """Return the parameters of a block."""
        return self._blocks[block]

    def has_gradient(self, block: int) -> bool:
        """Return whether part of the block's gradient came to the host earlier in this step."""
        return self._tracker.has_gradient(block)

    def events_of(self, block: int) -> list[Event]:
        """Return the events after which the block's gradient so far is on the host."""
        return self._tracker.events_of(block)

    def arrived(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> None:
        """Take note that a segment's gradients are on the host once `event` is done."""
        label = "" if self.stream.record is None else self.stream.record.label
        complete = self._tracker.note(layers, blocks, event, touched)
        if self.combining is not None:  # in one order, whatever the segments are
            complete.sort(key=self._order.index, reverse=True)
        for block in complete:
            self._labels[block] = label
            after = self._combined(block)
            if not self.waits:
                self._submit(block, Decision(), after)
            else:
                members, gradient_of = self._blocks[block], self._store.gradient
                self.clipping.measure(self.stream, members, self.touched, gradient_of, after)

    def finish_step(self) -> None:
        """Submit what had to wait for all gradients; never blocks."""
        if not self.waits:
            return
        decision = self.clipping.decide(self.stream)
        for block in self._order:  # as the next forward wants them
            if block not in self.on_device:
                after, label = [self.clipping.decided], self._labels[block]
                self._submit(block, decision, after, label)

    def scale_of_loss(self) -> float:
        """Return by what this step's loss is multiplied; waits until the step before has decided.

        1 if losses are not scaled.
        """
        return self.clipping.scale_of_loss()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All streams of the host: updates, and the disk's."""
        disk, loads = self.disk, self._store.loads
        of_disk = () if disk is None else (disk.reading, disk.writing)
        return (self.stream, *of_disk, *(() if loads is None else (loads.reading,)))

    def require_disk(self) -> None:
        """Raise the error of an earlier write to disk, if one failed.

        Raises:
            DiskError: nothing is lost, but no further step can be kept.
        """
        if self.disk is not None:
            self.disk.require()

    def wait(self) -> None:
        """Block until all updates are applied."""
        self.clipping.decided.wait()
        for event in self.updated:
            event.wait()
        if self.disk is not None:
            self.disk.wait()

    def wait_for_range(self, start_bytes: int, stop_bytes: int) -> list[int]:
        """The same for the blocks that overlap a range of the arena; return them."""
        blocks = []
        for block, members in enumerate(self._blocks):
            ranges = [
                (self._offsets[id(p)], p.numel() * p.element_size())
                for p in members
                if id(p) in self._offsets
            ]
            if any(at < stop_bytes and at + size > start_bytes for at, size in ranges):
                self.updated[block].wait()
                if self.disk is not None:
                    self.disk.wait(block)
                blocks.append(block)
        return blocks

    @property
    def waits(self) -> bool:
        """Whether updates wait for the norm of all gradients: to clip, or to find overflows."""
        return self.clipping.waits

    def block_of(self, parameter: nn.Parameter) -> int:
        """Return the block that a parameter belongs to."""
        return self._block_of[id(parameter)]

    @property
    def workers(self) -> list[torch.optim.Optimizer | None]:
        """What updates the blocks that are updated on the host."""
        return [w for block, w in enumerate(self._workers) if block not in self.on_device]

    def worker_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        """Return the optimizer that updates a parameter and holds its state, if one does."""
        return self._owners.get(id(parameter))

    def close(self) -> None:
        """Finish the queued updates and end the threads."""
        self.stream.close()
        if self.disk is not None:
            self.disk.close()

    def restricted(
        self, block: int, copies: Mapping[int, Tensor] | None = None
    ) -> torch.optim.Optimizer | None:
        """Return the same optimizer for one block only, with state of its own.

        Args:
            block: Which one.
            copies: By the parameter's `id`, what is updated in its place; `None`: itself.

        Returns:
            `None` if nothing of the block is ever updated.
        """
        return worker_for(self.optimizer, self._blocks[block], copies)

    def _expected(self, deliveries: Mapping[Layers, Iterable[int]]) -> Iterable[int]:
        """Return the blocks in the order in which they will be updated."""
        if self.waits:
            return [block for block in self._order if block not in self.on_device]
        return self._tracker.order(deliveries)

    def _combined(self, block: int) -> Sequence[Event]:
        """Return the events after which a complete block may be updated."""
        after = self.events_of(block)
        start, stop = self._store.layout.gradient_range(block)
        if self.combining is None or start == stop:  # nothing of the block is trained
            return after
        return [self.combining(self._store.gradients_of(start, stop), after)]

    def _submit(
        self,
        block: int,
        decision: Decision,
        after: Sequence[Event],
        label: str | None = None,
    ) -> None:
        """Queue the update of a block."""
        job = self._update_job(block, decision)
        if self.disk is None or not self.disk.has(block):
            self.updated[block] = self.stream.submit(job, after, label)
            return
        members, touched = self._blocks[block], self.touched

        def changes() -> bool:
            return any(id(parameter) in touched for parameter in members)

        self.updated[block] = self.disk.submit(self.stream, block, job, after, label, changes)

    def _update_job(self, block: int, decision: Decision) -> Callable[[], None]:
        """Return the update of a block."""
        worker, members = self._workers[block], self._blocks[block]
        hyperparameters, touched = self.hyperparameters, self.touched

        def update() -> None:
            if worker is None or decision.skip:
                self._store.drop_gradients(members)
                return
            rewrite = tell_scaling(worker, decision.factor, decision.coefficient)
            for group in worker.param_groups:
                set_hyperparameters(group, hyperparameters[group["_group"]])
            for parameter in members:
                gradient = self._store.gradient(parameter) if id(parameter) in touched else None
                if gradient is not None and rewrite is not None:
                    gradient.mul_(rewrite)
                parameter.grad = gradient
            with self._guard:
                worker.step()
            for parameter in members:
                parameter.grad = None
            self._store.drop_gradients(members)

        return update


def _blocks(chain: Chain, layout: Layout) -> list[list[nn.Parameter]]:
    blocks: list[list[nn.Parameter]] = [[] for _ in range(len(layout.layers))]
    for parameter in chain.parameters:
        users = chain.users[id(parameter)]
        if len(users) == 1:
            blocks[users[0]].append(parameter)
        else:
            blocks.append([parameter])
    return blocks


def _in_model_order(chain: Chain) -> list[nn.Parameter]:
    by_id = {id(parameter): parameter for parameter in chain.parameters}
    return [by_id[key] for key in chain.names if key in by_id]


def _as_now(value: Any) -> Any:
    """Return a hyperparameter; schedulers write to one that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value
