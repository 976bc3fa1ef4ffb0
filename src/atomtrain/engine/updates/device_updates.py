"""Resident blocks that are updated on the device: in a step nothing of them crosses the link.

Parameters, moments and masters stay on the device from step to step. The host's copies are behind
from the first update on, and are brought up to date only when somebody asks for them:

| what moves | from | to | when |
|---|---|---|---|
| values, moments | host store, host's state | device | before a pass, where the host wrote last |
| update | gradients on the device | the same | when a gradient is complete; with clipping, before \
the next pass, which waits for the global norm |
| norms of gradients | device | host | at the end of a step with clipping |
| values, moments | device | host store, host's state | when asked for |

*Values* are parameters and masters, *moments* the rest of the optimizer's state. All of it is done
on compute's thread and stream, in the order of the visits; copies go through load and unload, and
are waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.engine.devices.device import Device
from atomtrain.engine.state.precision import PRECISIONS, KeepsMasters
from atomtrain.engine.state.residents import Copy, Residents
from atomtrain.engine.state.store import view_of
from atomtrain.engine.updates.grad_clipping import Decision
from atomtrain.engine.updates.optimizer import KeepsScratch, set_hyperparameters, tell_scaling
from atomtrain.engine.updates.updates import Updates
from atomtrain.planning.plan.shape import Layers

_NORM_BYTES = 8


@dataclass
class _Current:
    """Where a block is up to date: on the device, on the host, or on both."""

    device_values: bool = False
    device_moments: bool = False
    host_values: bool = True
    host_moments: bool = True


class _Pending(NamedTuple):
    """An update that waits for the global norm."""

    block: int
    touched: frozenset[int]
    hyperparameters: Sequence[Mapping[str, Any]]


class DeviceUpdates:
    """The optimizer state of blocks that are updated on the device. Compute's thread only."""

    def __init__(
        self, blocks: Sequence[int], residents: Residents, device: Device, updates: Updates
    ) -> None:
        """Take over these blocks from the host's updates; their state comes with the first pass."""
        self._residents, self._device, self._updates = residents, device, updates
        self._workers = {b: updates.restricted(b, residents.leaves) for b in blocks}
        self._current = {block: _Current() for block in blocks}
        self._pending: list[_Pending] = []
        self._norms: dict[int, Tensor] = {}
        self._leaving: list[Tensor] = []
        """Norms on their way to the host: compute may not have their memory again before."""
        count = sum(len(updates.members(block)) for block in blocks)
        self._norm_buffer = device.host_empty(_NORM_BYTES * count)
        updates.on_device = frozenset(blocks)

    @property
    def workers(self) -> list[torch.optim.Optimizer | None]:
        """What updates the blocks here."""
        return list(self._workers.values())

    def begin(self) -> None:
        """Make the device current before a pass over the segments."""
        self.flush()
        events = []
        for block, at in self._current.items():
            copies = [] if at.device_values else [self._residents.load_of(block)]
            copies += self._state_to_device(block, not at.device_values, not at.device_moments)
            at.device_values = at.device_moments = True
            if copies:
                job = _each(copies, self._device.copy_in)
                after = [self._device.mark(), self._updates.updated[block]]
                events.append(self._device.load.submit(job, after, "state of residents"))
        for event in events:
            self._device.hold(event)

    def completed(self, layers: Layers, touched: set[int]) -> None:
        """Update the blocks whose gradients are complete after the backward visit of a segment.

        Args:
            layers: The segment.
            touched: Ids of the parameters that have gradients in this step.
        """
        for block in self._residents.completed_by(layers):
            if block not in self._workers:
                continue
            here = frozenset(id(p) for p in self._updates.members(block) if id(p) in touched)
            pending = _Pending(block, here, self._updates.hyperparameters)
            if not self._updates.waits:
                self._update(pending, Decision())
                continue
            self._pending.append(pending)
            for key in here:
                gradient = self._residents.gradient(block, key)
                if self._updates.clipping.loss_scale is not None:  # as the update takes it
                    gradient = gradient.float()
                self._norms[key] = torch.linalg.vector_norm(gradient, 2.0)

    def finish_step(self) -> None:
        """Hand the norms of gradients to the host; never blocks."""
        if not self._norms:
            return
        places = {
            key: view_of(self._norm_buffer, _NORM_BYTES * index, norm)
            for index, (key, norm) in enumerate(self._norms.items())
        }
        copies = [Copy(places[key], norm) for key, norm in self._norms.items()]
        self._leaving, self._norms = list(self._norms.values()), {}
        job = _each(copies, self._device.copy_out)
        event = self._device.unload.submit(job, [self._device.mark()], "norms of gradients")
        self._updates.clipping.measured(places, event)

    def flush(self) -> None:
        """Do the updates that waited for the global norm."""
        if not self._pending:
            return
        self._device.hold(self._updates.clipping.decided)
        self._leaving = []
        for pending in self._pending:
            self._update(pending, self._updates.clipping.decision)
        self._pending = []

    def to_host(self, blocks: Iterable[int], *, moments: bool = True) -> None:
        """Bring the host's copies up to date; blocks until they are.

        Args:
            blocks: Others than those on the device are passed over.
            moments: Whether the optimizer's state comes too, or just parameters and masters.
        """
        self.flush()
        events = []
        for block in blocks:
            at = self._current.get(block)
            if at is None:
                continue
            copies = [] if at.host_values else [self._residents.save_of(block)]
            wanted = moments and not at.host_moments
            copies += self._state_to_host(block, not at.host_values, wanted)
            at.host_values = True
            at.host_moments |= moments
            if copies:
                job = _each(copies, self._device.copy_out)
                events.append(self._device.unload.submit(job, [self._device.mark()]))
        for event in events:
            event.wait()

    def wrote(self, block: int, *, values: bool = False, moments: bool = False) -> None:
        """Take note that the host's copies of a block, which were current, have been written to."""
        at = self._current.get(block)
        if at is not None:
            at.device_values &= not values
            at.device_moments &= not moments

    def _update(self, pending: _Pending, decision: Decision) -> None:
        block, touched, hyperparameters = pending
        worker = self._workers[block]
        if worker is None or decision.skip:  # None: nothing of the block is ever updated
            return
        rewrite = tell_scaling(worker, decision.factor, decision.coefficient)
        for group in worker.param_groups:
            set_hyperparameters(group, hyperparameters[group["_group"]])
        leaves = [(id(p), self._residents.leaves[id(p)]) for p in self._updates.members(block)]
        for key, leaf in leaves:
            leaf.grad = self._residents.gradient(block, key) if key in touched else None
            if leaf.grad is not None and rewrite is not None:
                leaf.grad.mul_(rewrite)
        worker.step()
        if isinstance(worker, KeepsScratch):  # other visits need the memory
            worker.free_scratch()
        for _, leaf in leaves:
            leaf.grad = None
        at = self._current[block]
        at.host_values = at.host_moments = False
        for parameter in self._updates.members(block):
            owner = self._updates.worker_of(parameter)
            if owner is not None:
                owner.state.pop(parameter, None)  # behind from now on

    def _state_to_device(self, block: int, values: bool, moments: bool) -> list[Copy]:
        """Make the device's state like the host's; return the copies that fill it."""
        copies: list[Copy] = []
        for here, there, is_value in self._states(block):
            if moments:
                for key in [key for key in there if not is_value(key) and key not in here]:
                    del there[key]
            for key, value in here.items():
                if not (values if is_value(key) else moments):
                    continue
                if not isinstance(value, Tensor) or value.dim() == 0:
                    there[key] = self._scalar(block, value)
                    continue
                old = there.get(key)
                if old is None or old.shape != value.shape or old.dtype != value.dtype:
                    there[key] = self._device.empty(tuple(value.shape), value.dtype)
                copies.append(Copy(there[key], value))
        return copies

    def _state_to_host(self, block: int, values: bool, moments: bool) -> list[Copy]:
        """Make places for the device's state on the host; return the copies that fill them."""
        copies: list[Copy] = []
        with self._device.on_host():
            for here, there, is_value in self._states(block):
                for key, value in there.items():
                    if not (values if is_value(key) else moments):
                        continue
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        here[key] = value.cpu().clone() if isinstance(value, Tensor) else value
                        continue
                    here[key] = torch.empty(value.shape, dtype=value.dtype)
                    copies.append(Copy(here[key], value))
        return copies

    def _states(
        self, block: int
    ) -> Iterable[tuple[dict[str, Any], dict[str, Any], Callable[[str], bool]]]:
        """Yield the host's and the device's state of each parameter, and what of it is a value."""
        worker = self._workers[block]
        for parameter in self._updates.members(block):
            owner = self._updates.worker_of(parameter)
            if worker is None or owner is None:
                continue
            masters = _master_keys(owner, parameter)
            leaf = self._residents.leaves[id(parameter)]
            yield owner.state[parameter], worker.state[leaf], masters.__contains__

    def _scalar(self, block: int, value: Any) -> Any:
        """Return a number of the state where the optimizer wants it."""
        if not isinstance(value, Tensor):
            return value
        worker = self._workers[block]
        assert worker is not None
        counts_there = any(g.get("fused") or g.get("capturable") for g in worker.param_groups)
        return value.to(self._device.torch_device, copy=True) if counts_there else value.clone()


def _master_keys(owner: torch.optim.Optimizer, parameter: nn.Parameter) -> frozenset[str]:
    if parameter.dtype in PRECISIONS.values() and isinstance(owner, KeepsMasters):
        return owner.master_keys()
    return frozenset()


def _each(copies: Sequence[Copy], copy: Callable[[Tensor, Tensor], None]) -> Callable[[], None]:
    def job() -> None:
        for target, source in copies:
            copy(target, source)

    return job
