"""What offloading takes of compute, measured on the real layers by the engine's own ways to run.

Where compute itself packs and unpacks what is saved, and makes again what is not sent, that is a
good part of a narrow layer's time, and no formula knows how fast each operation is. Just that is
timed, while the layer runs: it is a few percent of the layer's time, which itself differs by more
from one run to the next. So it is told well which of two ways to offload takes less. What the layer
takes more beside (copies share memory and caches with it, threads wake up) is the same for all
ways, and is found by comparing whole runs.

As in `machines.py` the computing thread's own processor time counts: waits are in the
plan's timeline.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LONGEST_S, LayerTime, example_values, usual_s
from atomtrain.analysis.costs.rematerialization import Find, Rematerializer
from atomtrain.analysis.costs.storages import ALIGNED_BYTES
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.execution.compiled import CompiledLayer
from atomtrain.engine.execution.graphs import WaitingGraph, Where
from atomtrain.engine.execution.offload import Offload, Parcel
from atomtrain.engine.execution.program_runs import (
    ChainPrograms,
    Known,
    Lesson,
    OffloadedRun,
    ProgramRun,
    SegmentRun,
    looked_at,
)
from atomtrain.engine.execution.programs import Operation
from atomtrain.engine.execution.saved_script import Key, Script
from atomtrain.engine.state.gradients import Collector
from atomtrain.planning.cost.segments import SavedTensors

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 10
_MOST_S = 3.0
"""Of all kinds together; after its share of this no round of a kind begins beyond the least."""
_UNLIMITED_BYTES = 1 << 62
_LINK_BYTES_PER_S = 1e11


class _Spent(NamedTuple):
    """Seconds of one micro-batch in a layer, on the way to the host and back."""

    forward_s: float
    """Of forward, what offloading itself took."""
    backward_s: float
    """The same of backward, making again included."""
    total_s: float
    """Forward and backward."""


class _Sample(NamedTuple):
    """One micro-batch in a layer, in each way."""

    plain_s: float
    """Forward and backward, with nothing offloaded."""
    again: _Spent
    sent: _Spent
    """Where nothing is made again."""

    @property
    def besides_s(self) -> list[float]:
        """What each way took more, beside what offloading itself took."""
        return [
            way.total_s - self.plain_s - way.forward_s - way.backward_s
            for way in (self.again, self.sent)
        ]


def with_offloading(
    times: Mapping[str, LayerTime], chain: Chain, costs: ChainCosts, inputs: Mapping[str, Any]
) -> dict[str, LayerTime]:
    """Return the times with what offloading adds to them on the emulated device.

    Layers that cannot be offloaded, and those that take too long to be measured, stay as they are.

    Args:
        times: Of kinds of layers.
        chain: With real parameters; they are not changed.
        costs: Of the chain.
        inputs: One micro-batch, by the chain's input names.
    """
    able: dict[str, int] = {}
    for number, cost in enumerate(costs.layers[:-1]):
        known = times.get(cost.kind)
        if known is not None and cost.saved.movable and sum(known[:2]) <= LONGEST_S:
            able.setdefault(cost.kind, number)
    windows = {
        remakes: SavedTensors(chain, costs if remakes else costs.sending_all()).window_bytes
        for remakes in (True, False)
    }
    found = dict(times)
    device = EmulatedDevice(_UNLIMITED_BYTES, _LINK_BYTES_PER_S)
    try:
        with torch.random.fork_rng([]):
            # One after the other: each is measured on copies of its parameters.
            for kind, number in able.items():
                values = example_values(chain.layers[number], costs, inputs, device.torch_device)
                bench = _Bench(chain, costs, number, values, device, windows)
                found[kind] = _added(times[kind], _samples(bench, _MOST_S / len(able)))
                del bench, values
    finally:
        device.close()
    return found


def _samples(bench: _Bench, most_s: float) -> list[_Sample]:
    bench.sample()  # touches memory
    samples: list[_Sample] = []
    ends_s = time.perf_counter() + most_s
    while len(samples) < _LEAST_ROUNDS or (
        len(samples) < _MOST_ROUNDS and time.perf_counter() < ends_s
    ):
        samples.append(bench.sample())
    return samples


def _added(known: LayerTime, samples: Sequence[_Sample]) -> LayerTime:
    again, sent = (
        _Spent(*map(usual_s, zip(*ways, strict=True)))
        for ways in ([sample.again for sample in samples], [sample.sent for sample in samples])
    )
    beside_s = statistics.median(each_s for sample in samples for each_s in sample.besides_s)
    beside_s = max(0.0, beside_s)
    return known._replace(
        offload_forward_s=again.forward_s,
        offload_backward_s=again.backward_s + beside_s,
        send_forward_s=sent.forward_s,
        send_backward_s=sent.backward_s + beside_s,
    )


class _Timer:
    """The processor's time of this thread while something is done, nested or not."""

    def __init__(self) -> None:
        self._depth, self._spent_s = 0, 0.0

    def timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function."""
        started_s = time.thread_time()
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self._spent_s += time.thread_time() - started_s

    def of(self, operation: Operation) -> Operation:
        """Return what calls an operation, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.timed(operation, *args, **kwargs)

        return timed

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


class _TimedRematerializer(Rematerializer):
    def __init__(self, find: Find, timer: _Timer) -> None:
        super().__init__(find)
        self._timer = timer

    def _note(self, *arguments: Any) -> None:
        self._timer.timed(super()._note, *arguments)


class _TimedGraph(WaitingGraph):
    """Times all that it does beside the layers."""

    def __init__(
        self,
        where: Where,
        parcel: Parcel,
        scripts: dict[Key, Script],
        timer: _Timer,
        *,
        remakes: bool,
        compiled: bool,
        lesson: Lesson | None,
    ) -> None:
        super().__init__(where, parcel, scripts, remakes=remakes, compiled=compiled, lesson=lesson)
        self._timer = timer

    def _new_rematerializer(self) -> Rematerializer:
        return _TimedRematerializer(self._find, self._timer)

    def _hooks(self, pack: Callable[[Tensor], Any]) -> saved_tensors_hooks:
        return super()._hooks(functools.partial(self._timer.timed, pack))

    def _unpack(self, packed: Any) -> Tensor:
        unpacked: Tensor = self._timer.timed(super()._unpack, packed)
        return unpacked


class _TimedRun(OffloadedRun):
    """Times what it does for the way to the host and back."""

    def __init__(
        self,
        known: Known,
        leaves: Sequence[Tensor],
        collector: Collector,
        parcel: Parcel,
        timer: _Timer,
    ) -> None:
        super().__init__(known, leaves, collector, parcel)
        self._timer = timer

    def send(self, number: int, tensor: Tensor) -> None:
        self._timer.timed(super().send, number, tensor)

    def take(self, number: int) -> Tensor:
        taken: Tensor = self._timer.timed(super().take, number)
        return taken

    def done(self, number: int) -> None:
        self._timer.timed(super().done, number)


class _TimedSegment(SegmentRun):
    """One layer's run by its program, timed."""

    def __init__(
        self,
        known: Sequence[Known],
        leaves: Sequence[Sequence[Tensor]],
        parcel: Parcel,
        collector: Collector,
        timer: _Timer,
    ) -> None:
        super().__init__(known, leaves, parcel, collector)
        self._timer = timer

    def _begun(self, known: Known, leaves: Sequence[Tensor]) -> ProgramRun:
        assert self.parcel is not None
        self.parcel.begin_layer()
        return _TimedRun(known, leaves, self._collector, self.parcel, self._timer)


class _Bench:
    """A layer with parameters in a slot, as in the engine."""

    def __init__(
        self,
        chain: Chain,
        costs: ChainCosts,
        number: int,
        values: Sequence[Any],
        device: EmulatedDevice,
        windows: Mapping[bool, int],
    ) -> None:
        """Copy the parameters.

        Args:
            chain: The layer's.
            costs: Of the chain.
            number: Of the layer.
            values: What it reads.
            device: Idle.
            windows: Bytes of the window, where something is made again and where not.
        """
        layer = chain.layers[number]
        self._layer, self._layers, self._device = layer, (number, number + 1), device
        self._timer, self._collector = _Timer(), Collector(device.hold)
        self._compiled = any(isinstance(one, CompiledLayer) for one in chain.layers)
        self._programs = {
            remakes: ChainPrograms(chain, costs, remakes=remakes, again=self._timer.of)
            for remakes in windows
        }
        for programs in self._programs.values():
            programs.begin()
        self._values = dict(zip(layer.reads, values, strict=True))
        pool = HostPool(device)
        self._offloads = {remakes: Offload(device, pool, n) for remakes, n in windows.items()}
        parameters = layer.parameters
        aligned = [-(-p.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for p in parameters.values()]
        self._slot = torch.empty(sum(aligned), dtype=torch.uint8)
        self._tensors: dict[str, Tensor] = {}
        for (name, parameter), place in zip(
            parameters.items(), self._slot.split(aligned), strict=True
        ):
            tensor = place[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            tensor.copy_(parameter.detach())
            tensor.requires_grad_(parameter.requires_grad)
            if tensor.requires_grad:
                # As in training, where all but a step's first micro-batch add to what is there.
                tensor.grad = torch.zeros_like(tensor)
            self._tensors[name] = tensor
        buffers = {name: buffer.detach().clone() for name, buffer in layer.buffers.items()}
        self._tensors.update(buffers)
        staying = frozenset(b.untyped_storage()._cdata for b in buffers.values())
        self._where = Where(self._slot, staying, frozenset())
        self._scripts: dict[bool, dict[Key, Script]] = {True: {}, False: {}}
        names = layer.module.names if isinstance(layer.module, GraphLayer) else ()
        self._stays = [[self._tensors[name] for name in names]]

    def sample(self) -> _Sample:
        """Run the layer in all ways, one after the other."""
        with self._device.computing(), torch.no_grad():
            return _Sample(
                self._plain_s(), self._offloaded(remakes=True), self._offloaded(remakes=False)
            )

    def _plain_s(self) -> float:
        """Return the seconds of one micro-batch with nothing offloaded."""
        known = self._programs[False].find(self._key())
        if known is not None:
            looked = looked_at(known, self._stays)
            kept = SegmentRun(known, looked, None, self._collector)
            return self._trained(kept, looked, self._offloads[False], [])[0].total_s
        started_s = time.thread_time()
        with torch.enable_grad():
            written = self._run(self._values, self._layer.run)
            roots = [v for v in written.values() if isinstance(v, Tensor) and v.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for value in self._values.values():
            if isinstance(value, Tensor):
                value.grad = None
        return time.thread_time() - started_s

    def _offloaded(self, *, remakes: bool) -> _Spent:
        offload, programs, key = self._offloads[remakes], self._programs[remakes], self._key()
        parcel = offload.parcel(alone=True)
        known = programs.find(key)
        if known is not None:
            looked = looked_at(known, self._stays)
            segment = _TimedSegment(known, looked, parcel, self._collector, self._timer)
            return self._trained(segment, looked, offload, [parcel])[0]
        # By autograd, as the engine does where there is no program, or to learn it.
        graph = _TimedGraph(
            self._where,
            parcel,
            self._scripts[remakes],
            self._timer,
            remakes=remakes and not self._compiled,
            compiled=self._compiled,
            lesson=programs.lesson(key),
        )
        spent, gradients = self._trained(graph, self._slot, offload, [parcel])
        if graph.lesson is not None:
            programs.learn(graph.lesson, self._stays, gradients, kept=False)
        return spent

    def _key(self) -> Any:
        """Return under what programs of the layer are known; `None` if it has none."""
        return None if self._compiled else self._programs[True].key_of(self._layers, self._values)

    def _trained(
        self,
        graph: WaitingGraph | SegmentRun,
        where: Any,
        offload: Offload,
        parcels: Sequence[Parcel],
    ) -> tuple[_Spent, dict[str, Tensor]]:
        """Run one micro-batch; return what it took, and the gradients of what the layer reads.

        Args:
            graph: What runs it.
            where: What its backward takes of the parameters.
            offload: The way to the host.
            parcels: What has something there.
        """
        timer = self._timer

        def run(values: Mapping[str, Any]) -> dict[str, Any]:
            if isinstance(graph, SegmentRun):
                return self._run(values, lambda _, given: graph.layer(given))
            return self._run(values, functools.partial(graph.layer, 0, self._layer))

        taken = {n: v.detach() if isinstance(v, Tensor) else v for n, v in self._values.items()}
        needs = {n for n, v in self._values.items() if isinstance(v, Tensor) and v.requires_grad}
        started_s = time.thread_time()
        written = graph.run(taken, needs.__contains__, run, self._layer.writes)
        timer.timed(offload.drain)
        forward_s = timer.take_s()
        timer.timed(offload.turn, parcels)
        gradients = graph.backward(
            where,
            lambda name: name in written,
            lambda name: torch.ones_like(written[name]),
        )
        return _Spent(forward_s, timer.take_s(), time.thread_time() - started_s), gradients

    def _run(self, values: Mapping[str, Any], run: Callable[..., Sequence[Any]]) -> dict[str, Any]:
        taken = [values[name] for name in self._layer.reads]
        return dict(zip(self._layer.writes, run(self._tensors, taken), strict=True))
