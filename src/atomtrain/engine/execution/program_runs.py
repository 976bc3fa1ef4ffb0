"""The segments that run by programs: which they are, and one run, from forward to backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.storages import View, seen_as, view_of
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.engine.devices.gpus import attention_kernels
from atomtrain.engine.execution.offload import Package, Parcel, SentStorage, view_in
from atomtrain.engine.execution.programs import Instead, LayerProgram, Like, like, program_of
from atomtrain.engine.state.gradients import Collector
from atomtrain.errors import reason_of
from atomtrain.planning.plan.shape import Layers

Strides = tuple[int, ...]
_LOG = logging.getLogger(__name__)
_below_autograd = torch._C._AutoDispatchBelowAutograd
"""Within it operations go past autograd, which would find out each time that it has nothing to do:
a program's operations are those that autograd itself did."""


def _switches() -> tuple[bool, ...]:
    """Return what of the process decides which operations a layer becomes."""
    return (torch.are_deterministic_algorithms_enabled(), *attention_kernels())


class Known(NamedTuple):
    """A layer's program, and how gradients lie in memory where autograd makes them."""

    layer: Layer
    program: LayerProgram
    root: str
    """The value whose gradient comes."""
    gradient: Strides
    """Of that gradient."""
    gradients: Mapping[str, Strides]
    """Of those that go."""
    keys: Sequence[int]
    """The `id` of each parameter that it takes; 0 of a buffer."""
    ways: dict[int, tuple[View | None, Package]]
    """Where each tensor that it makes and sends lies in what comes back (`None`: all of it), and
    what that is on its way, in every run; filled by the first one."""


def looked_at(known: Sequence[Known], stays: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return parameters and buffers, and what programs look at in them, by layer."""
    return [each.program.looks(*own) for each, own in zip(known, stays, strict=True)]


class Lesson:
    """What a segment ran with by autograd, from which its programs are made."""

    def __init__(self, key: Any, layers: Layers) -> None:
        """Know of nothing yet; `key` is under which they will be found."""
        self.key, self.layers = key, layers
        self.reads: list[list[Like] | None] = []
        """Of each layer what it reads; `None` where something is not a tensor."""
        self.seeds: dict[str, Like] = {}
        """The gradients of what was written, by name."""

    def note(self, layer: Layer, values: Sequence[Any], written: Sequence[Any]) -> None:
        """Take note of what a layer took, and of the gradients that will come."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        reads = [like(tensor, requires_grad=tensor.requires_grad) for tensor in tensors]
        self.reads.append(reads if len(reads) == len(values) else None)
        for name, value in zip(layer.writes, written, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._noting(name))

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        seeds = self.seeds

        def note(gradient: Tensor) -> None:
            seeds[name] = like(gradient, requires_grad=False)

        return note


class ChainPrograms:
    """The programs of a chain's layers. A segment runs once by autograd, which tells how gradients
    lie in memory, and from then on by programs, if all of its layers have one."""

    def __init__(
        self, chain: Chain, costs: ChainCosts, *, remakes: bool, again: Instead | None = None
    ) -> None:
        """Know of none yet; with `remakes` what is cheap is made again (by `again`), not sent."""
        self._chain, self._costs = chain, costs
        self._remakes, self._again = remakes, again
        self._readers: dict[str, int] = {}
        for layer in chain.layers:
            for name in layer.reads:
                self._readers[name] = self._readers.get(name, 0) + 1
        self._now: Any = None
        self._able: dict[Layers, bool] = {}
        self._known: dict[Any, list[Known] | None] = {}
        self._kinds: dict[Any, LayerProgram | None] = {}

    def begin(self) -> None:
        """Take note of the process's switches, for as long as a step or an evaluation runs."""
        by_hand = torch._C._is_any_autocast_enabled() or torch.is_anomaly_enabled()
        self._now = None if by_hand else _switches()

    def key_of(self, layers: Layers, values: Mapping[str, Any]) -> Any:
        """Return under what the programs of a segment on such values are known; `None` if it cannot
        have any."""
        able = self._able.get(layers)
        if able is None:
            able = self._able[layers] = self._is_able(layers)
        if not able or self._now is None or self._module(layers[0]).mode.is_other:
            return None
        lie = [(v.shape, v.stride()) if isinstance(v, Tensor) else None for v in values.values()]
        return layers, self._now, *lie

    def find(self, key: Any) -> list[Known] | None:
        """Return the programs of a segment's layers, if they are known; of `None` none are."""
        return self._known.get(key)

    def has(self, key: Any) -> bool:
        """Return whether programs are known of a segment, or are still to be learnt."""
        return key is not None and self._known.get(key, ()) is not None

    def lesson(self, key: Any) -> Lesson | None:
        """Return what is to take note of a segment that runs by autograd, if anything is."""
        return None if key is None or key in self._known else Lesson(key, key[0])

    def learn(
        self,
        lesson: Lesson,
        stays: Sequence[Sequence[Tensor]],
        gradients: Mapping[str, Tensor],
        *,
        kept: bool,
    ) -> None:
        """Make programs of what autograd did.

        Args:
            lesson: What the segment ran with.
            stays: Parameters and buffers, by layer.
            gradients: Those that went.
            kept: Whether what is saved stays on the device.
        """
        if lesson.key in self._known:  # an earlier micro-batch told
            return
        strides = {name: one.stride() for name, one in gradients.items()}
        strides.update({name: one.stride for name, one in lesson.seeds.items()})
        found: list[Known] | None = []
        for number, reads, own in zip(range(*lesson.layers), lesson.reads, stays, strict=True):
            layer = self._chain.layers[number]
            root = next(n for n in layer.writes if self._costs.values[n].requires_grad)
            seed = lesson.seeds.get(root)
            program = None
            if reads is not None and seed is not None:
                kept_here = [like(t, requires_grad=t.requires_grad) for t in own]
                program = self._program(number, kept_here, reads, seed, remakes=not kept)
            if program is None or seed is None:
                found = None
                break
            parameters = layer.parameters
            keys = [id(parameters[n]) if n in parameters else 0 for n in self.names(number)]
            assert found is not None
            found.append(Known(layer, program, root, seed.stride, strides, keys, {}))
        self._known[lesson.key] = found

    def names(self, number: int) -> Sequence[str]:
        """Return the parameters and buffers that a layer's program takes, in their order."""
        return self._module(number).names

    def _program(
        self, number: int, stays: list[Like], reads: list[Like], seed: Like, *, remakes: bool
    ) -> LayerProgram | None:
        module, layer = self._module(number), self._chain.layers[number]
        root = [self._costs.values[name].requires_grad for name in layer.writes].index(True)
        kind = (module.template, self._now, remakes, seed, len(reads), *reads, *stays)
        if kind not in self._kinds:
            names = module.names

            def run(given: Sequence[Any]) -> Sequence[Any]:
                return module.run(dict(zip(names, given, strict=False)), given[len(names) :])

            try:
                self._kinds[kind] = program_of(
                    run, stays, reads, seed, root,
                    remakes=remakes and self._remakes, again=self._again,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001  any operation may refuse to be traced
                _LOG.warning(
                    "layer %r and those like it run by autograd, which takes longer: %s",
                    layer.name,
                    reason_of(error),
                )
                self._kinds[kind] = None
        return self._kinds[kind]

    def _module(self, number: int) -> GraphLayer:
        module = self._chain.layers[number].module
        assert isinstance(module, GraphLayer)
        return module

    def _is_able(self, layers: Layers) -> bool:
        parameters = [
            id(parameter)
            for layer in self._chain.layers[slice(*layers)]
            for parameter in layer.parameters.values()
        ]
        return len(set(parameters)) == len(parameters) and all(map(self._is_fit, range(*layers)))

    def _is_fit(self, number: int) -> bool:
        layer, cost, values = (
            self._chain.layers[number],
            self._costs.layers[number],
            self._costs.values,
        )
        if not isinstance(layer.module, GraphLayer) or cost.changes_buffers:
            return False
        # The gradients of a value that several layers read add up in autograd's order.
        alone = all(self._readers[n] == 1 for n in layer.reads if values[n].requires_grad)
        roots = [name for name in layer.writes if values[name].requires_grad]
        return alone and cost.saved.movable and len(roots) == 1


class ProgramRun:
    """One micro-batch's run of a layer by its program, from its forward visit to its backward
    visit. What backward needs stays on the device."""

    def __init__(self, known: Known, leaves: Sequence[Tensor], collector: Collector) -> None:
        """Begin.

        Args:
            known: The program.
            leaves: Parameters and buffers, whose gradients are added to, and the looks at them.
            collector: Takes the gradients.
        """
        self.known, self._leaves, self._collector = known, leaves, collector
        self._kept: dict[int, Tensor] = {}
        self._gradient: Tensor | None = None

    def forward(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return what the layer writes."""
        with _below_autograd():
            return self.known.program.forward(self, *self._leaves, *values)

    def again(self, values: Sequence[Any]) -> Sequence[Any]:
        """Do again what backward needs; nothing is written."""
        with _below_autograd():
            self.known.program.again(self, *self._leaves, *values)
        return [None] * len(self.known.layer.writes)

    def backward(self, stays: Sequence[Tensor], gradient: list[Tensor]) -> dict[str, Tensor]:
        """Add to the gradients of parameters; return those of what was read.

        Args:
            stays: Parameters and buffers where they are now, and the looks at them.
            gradient: Of what was written, alone in a list, which is emptied.
        """
        known = self.known
        self._gradient = _with_strides(gradient.pop(), known.gradient)
        with _below_autograd():
            found = known.program.backward(self, *stays)
        return {
            name: _with_strides(one, known.gradients[name])
            for name, one in zip(known.layer.reads, found, strict=True)
            if one is not None
        }

    def gradient(self) -> Tensor:
        """Hand over the gradient of what was written."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return gradient

    def send(self, number: int, tensor: Tensor) -> None:
        """Keep a tensor until backward."""
        self._kept[number] = tensor

    def take(self, number: int) -> Tensor:
        """Return the tensor that was sent."""
        return self._kept[number]

    def done(self, number: int) -> None:
        """Take note that nobody needs it any more."""
        del self._kept[number]

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        self._collector.add(self.known.keys[number], self._leaves[number], gradient)


class OffloadedRun(ProgramRun):
    """One whose tensors wait on the host, but for those that have no place there."""

    def __init__(
        self, known: Known, leaves: Sequence[Tensor], collector: Collector, parcel: Parcel
    ) -> None:
        """Begin; `parcel` takes what is sent."""
        super().__init__(known, leaves, collector)
        self._parcel, self._offload, self._ways = parcel, parcel.offload, known.ways
        self._sent: dict[int, tuple[SentStorage, View | None]] = {}

    def forward(self, values: Sequence[Any]) -> Sequence[Any]:
        written = super().forward(values)
        sent = self._sent
        self._parcel.note([sent[n][0] for n in self.known.program.sent if n in sent])
        return written

    def send(self, number: int, tensor: Tensor) -> None:
        way = self._ways.get(number)
        if way is not None and self._parcel.alone:
            view, package = way
            sent = self._offload.send(tensor, package)
        elif way is None and not self._parcel.takes(tensor):
            self._kept[number] = tensor
            return
        else:
            sent = self._parcel.send(tensor)
            view = view_in(sent.package, view_of(tensor))
            if number >= self.known.program.reads:  # what is read may lie elsewhere each time
                self._ways[number] = view, sent.package
        sent.users += 1
        self._sent[number] = sent, view

    def take(self, number: int) -> Tensor:
        found = self._sent.get(number)
        if found is None:
            return self._kept[number]
        sent, view = found
        back = self._offload.use(sent)
        return back if view is None else seen_as(back, view)

    def done(self, number: int) -> None:
        found = self._sent.get(number)
        if found is None:
            del self._kept[number]
            return
        sent, _ = found
        sent.users -= 1
        self._offload.used(sent)


class ForgottenRun(ProgramRun):
    """One that is run again for backward, so that nothing waits."""

    def send(self, number: int, tensor: Tensor) -> None:
        pass


class SegmentRun:
    """One micro-batch's run of a segment by programs; where no graph is made (`torch.no_grad`)."""

    def __init__(
        self,
        known: Sequence[Known],
        leaves: Sequence[Sequence[Tensor]],
        parcel: Parcel | None,
        collector: Collector,
        *,
        forgets: bool = False,
        again: bool = False,
    ) -> None:
        """Begin.

        Args:
            known: The programs, by layer.
            leaves: Parameters and buffers, and the looks at them, by layer.
            parcel: Takes what is sent; `None` keeps it.
            collector: Takes the gradients.
            forgets: Nothing that is sent is kept: the segment is run again for backward.
            again: It is run for backward alone: what the last layer writes is left out.
        """
        self.known, self.parcel = known, parcel
        self._collector, self._forgets = collector, forgets
        self._last = len(known) if again else 0
        self._next = zip(known, leaves, strict=True)
        self._runs: list[ProgramRun] = []

    def run(
        self,
        taken: Mapping[str, Any],
        _with_gradient: Callable[[str], bool],
        layers: Callable[[Mapping[str, Any]], dict[str, Any]],
        _writes: Iterable[str],
    ) -> dict[str, Any]:
        """Run the segment forward, as `WaitingGraph.run` does."""
        return layers(taken)

    def layer(self, values: Sequence[Any]) -> Sequence[Any]:
        """Run the next layer."""
        run = self._begun(*next(self._next))
        self._runs.append(run)
        return run.again(values) if len(self._runs) == self._last else run.forward(values)

    def _begun(self, known: Known, leaves: Sequence[Tensor]) -> ProgramRun:
        if self._forgets:
            return ForgottenRun(known, leaves, self._collector)
        if self.parcel is None:
            return ProgramRun(known, leaves, self._collector)
        self.parcel.begin_layer()
        return OffloadedRun(known, leaves, self._collector, self.parcel)

    def backward(
        self,
        stays: Sequence[Sequence[Tensor]],
        begun: Callable[[str], bool],
        gradient_of: Callable[[str], Tensor],
    ) -> dict[str, Tensor]:
        """Run backward; return the gradients of the segment's inputs. The run is used up.

        Args:
            stays: Parameters and buffers where they are now, and the looks at them, by layer.
            begun: Whether later segments gave the value of a name a gradient.
            gradient_of: Returns that gradient.
        """
        found: dict[str, Tensor] = {}
        for own in reversed(stays):
            run = self._runs.pop()
            root = run.known.root
            if root in found:
                found.update(run.backward(own, [found.pop(root)]))
            elif begun(root):
                found.update(run.backward(own, [gradient_of(root)]))
        if self.parcel is not None:
            self.parcel.close()
        return found


def _with_strides(gradient: Tensor, strides: Strides) -> Tensor:
    """Return a gradient as autograd would have it in memory."""
    if gradient.stride() == strides:
        return gradient
    laid: Tensor = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
    return laid
