"""Several devices run a step together: each a share of the micro-batches, by the same plan.

The first device runs on the caller's thread, each of the others on a thread of its own. They read
one copy of the parameters; their gradients meet in `engine/updates/shares.py`. Within a step no
device waits for another one, so one that fails holds up nobody: the others stop after the segment
that they are in.

Buffers that forward changes (running statistics) follow the first device's micro-batches. The
others begin each step with them.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Aside, Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.streams import Record
from atomtrain.engine.execution.executor import Executor, Values
from atomtrain.engine.execution.randomness import micro_batch_seeds
from atomtrain.engine.execution.slots import Slots
from atomtrain.engine.state.residents import DeviceBuffers
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.updates.shares import Delivery, Share, Sums
from atomtrain.engine.updates.updates import Updates
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Visit

T = TypeVar("T")
_TABLES = ("_parameters", "_buffers", "_modules")


class SharedByDevices(NamedTuple):
    """What several devices have in common."""

    sums: Sums
    pool: ThreadPoolExecutor
    """A thread for each device but the first."""


class Member(NamedTuple):
    """One device of an engine, and what its executor works with."""

    device: Device
    chain: Chain
    store: HostStore
    delivery: Delivery


def join(
    chain: Chain, devices: Sequence[Device], store: HostStore, updates: Updates
) -> tuple[list[Member], SharedByDevices | None]:
    """Return the members of an engine, and what they have in common if there are several.

    Args:
        chain: The model's layers.
        devices: At least one; engines own them.
        store: The host store; further devices get gradients of their own beside it.
        updates: What all devices share.
    """
    if len(devices) == 1:
        return [Member(devices[0], chain, store, updates)], None
    sums = Sums(updates, store)
    members = [Member(devices[0], chain, store, Share(sums, store))]
    for device in devices[1:]:
        beside = store.beside(chain, device)
        members.append(Member(device, replica_of(chain), beside, Share(sums, beside)))
    pool = ThreadPoolExecutor(len(members) - 1, thread_name_prefix="atom-device")
    return members, SharedByDevices(sums, pool)


def executor_of(
    members: Sequence[Member], costs: ChainCosts, plan: Plan, shared: SharedByDevices | None
) -> Executor | MultiDeviceExecutor:
    """Return what runs a plan on one device or several."""
    executors = []
    for device, chain, store, delivery in members:
        with device.computing():
            executors.append(Executor(chain, costs, plan, store, device, delivery))
    return executors[0] if shared is None else MultiDeviceExecutor(members, executors, shared)


DEVICE_NUMBER = ContextVar("device_number", default=0)
"""Which of several devices the thread drives; each gets the micro-batches after those of the one
before."""


class _StoppedError(Exception):
    """Another device failed."""


@dataclass
class _Signals:
    """What the devices' threads look at after each visit."""

    stop: threading.Event = field(default_factory=threading.Event)
    visited: Callable[[Visit], None] | None = None

    def watch(self, *, first: bool) -> Callable[[Visit], None]:
        """Return what an executor calls; it holds no executor, so that there is no cycle."""

        def visited(visit: Visit) -> None:
            if self.stop.is_set():
                raise _StoppedError
            if first and self.visited is not None:
                self.visited(visit)

        return visited


class MultiDeviceExecutor:
    """The executors of several devices; what an `Executor` is to the engine."""

    def __init__(
        self, members: Sequence[Member], executors: Sequence[Executor], shared: SharedByDevices
    ) -> None:
        self._members, self._executors = members, executors
        self._sums, self._pool = shared
        self._signals = _Signals()
        for executor in executors:
            executor.visited = self._signals.watch(first=executor is executors[0])

    @property
    def slots(self) -> Slots:
        """Those of the first device."""
        return self._executors[0].slots

    @property
    def buffers(self) -> DeviceBuffers:
        """Those of the first device, which the model's follow."""
        return self._executors[0].buffers

    @property
    def record(self) -> Record | None:
        """Where the first device's visits are noted, or `None`."""
        return self._executors[0].record

    @record.setter
    def record(self, record: Record | None) -> None:
        self._executors[0].record = record

    @property
    def visited(self) -> Callable[[Visit], None] | None:
        """Called after each visit of the first device, on the caller's thread."""
        return self._signals.visited

    @visited.setter
    def visited(self, visited: Callable[[Visit], None] | None) -> None:
        self._signals.visited = visited

    def train(
        self, micro_batches: Sequence[Values], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Run forward and backward; gradients go to `Updates`. Return the losses (0-d).

        Arguments are as of `Executor.train`.
        """
        shares = divided(micro_batches, len(self._executors))
        seeds: list[int | None] = [None] * len(micro_batches)
        if self._executors[0].random and len(micro_batches) > 1:
            seeds = [*micro_batch_seeds(len(micro_batches))]
        numbers = divided(range(len(micro_batches)), len(self._executors))
        self._sums.begin()
        for executor, mine in zip(self._executors, numbers, strict=True):
            if mine:
                known = [seed for index in mine if (seed := seeds[index]) is not None]
                own = None if weights is None else [weights[index] for index in mine]
                executor.begin(len(mine), len(micro_batches), own, known or None)
        losses = self._run_all(shares, Executor.run)
        self._sums.whole.finish_step()
        return losses

    def evaluate(self, micro_batches: Sequence[Values]) -> list[Tensor]:
        """Run forward only. Return the losses (0-d)."""
        shares = divided(micro_batches, len(self._executors))
        return self._run_all(shares, Executor.evaluate)

    def refresh_buffers(self) -> None:
        """Copy the model's buffers to the devices again."""
        for executor in self._executors:
            executor.refresh_buffers()

    def _run_all(
        self,
        shares: Sequence[Sequence[Values]],
        work: Callable[[Executor, Sequence[Values]], list[Tensor]],
    ) -> list[Tensor]:
        """Let each device work on its share; return all losses in the order of the devices."""
        stop = self._signals.stop
        stop.clear()
        for member in self._members[1:]:
            refresh(member.chain, self._members[0].chain)
        changed = self.buffers.notice() or self.buffers.change
        if changed:
            self._members[0].device.synchronize()
            self.buffers.to_host()
        results: list[list[Tensor]] = [[] for _ in shares]
        errors: list[BaseException | None] = [None] * len(shares)

        def run(number: int) -> None:
            # The caller's thread computes on the first device already.
            device = self._members[number].device
            try:
                if number:
                    DEVICE_NUMBER.set(number)
                with device.computing() if number else nullcontext():
                    if number and changed:
                        self._executors[number].refresh_buffers()
                    results[number] = work(self._executors[number], shares[number])
            except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
                errors[number] = error
                stop.set()

        others = [number for number, share in enumerate(shares) if share and number]
        futures = [self._pool.submit(run, number) for number in others]
        run(0)
        try:
            wait(futures)
        except BaseException:  # the caller was interrupted
            stop.set()
            wait(futures)
            raise
        raised = [error for error in errors if error is not None]
        for error in raised:
            if not isinstance(error, _StoppedError):
                raise error
        return [loss for result in results for loss in result]


def divided(items: Sequence[T], among: int) -> list[Sequence[T]]:
    """Divide into runs of nearly the same length, the first ones longer by one; last ones may be
    empty."""
    size, longer = divmod(len(items), among)
    starts = [number * size + min(number, longer) for number in range(among + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(starts)]


def replica_of(chain: Chain) -> Chain:
    """Return a chain of the same layers that another thread may run at the same time."""
    known: dict[int, nn.Module] = {}
    layers = [
        dataclasses.replace(layer, module=_replica(layer.module, known)) for layer in chain.layers
    ]
    return dataclasses.replace(chain, layers=tuple(layers))


def refresh(replica: Chain, chain: Chain) -> None:
    """Take over what was changed in a chain's modules, such as their mode or a dropout's rate."""
    for target, source in zip(replica.layers, chain.layers, strict=True):
        pairs = zip(_modules_of(target.module), _modules_of(source.module), strict=True)
        for copy, module in pairs:
            for name, value in module.__dict__.items():
                if name not in _TABLES and not isinstance(value, Aside):
                    copy.__dict__[name] = value


def _modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in one, and those that it runs beside them."""
    for each in module.modules():
        yield each
        for value in each.__dict__.values():
            if isinstance(value, Aside):
                yield from value.module.modules()


def _replica(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) in known:
        return known[id(module)]
    replica = known[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in module.__dict__.items():
        aside = isinstance(value, Aside)
        replica.__dict__[name] = Aside(_replica(value.module, known)) if aside else value
    for name in _TABLES[:2]:
        replica.__dict__[name] = dict(module.__dict__[name])
    replica.__dict__["_modules"] = {
        name: None if child is None else _replica(child, known)
        for name, child in module._modules.items()
    }
    return replica
