"""What a model does before its language model, as several layers of which each has some modules.

Each layer runs the model's own forward from its beginning, but of the modules that hold weights
only its own: those before give what they gave in an earlier layer, and at the first one behind,
the layer ends. What is between such modules is run again in each layer; it has no weights and
draws no random numbers.

What a module returns may have other shapes in every micro-batch. So such a value travels flat, with
zeros behind it up to the size that it has in the example, so that it takes the same memory in each,
and beside it how much smaller its sides are.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atomtrain.analysis.export.structure import put_together, taken_apart
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.front import NAME, Front, OwnCode, elsewhere, instead
from atomtrain.analysis.layers.front_calls import Calls, between, path_in, recorded_calls
from atomtrain.errors import AnalysisError, ConfigError

_log = logging.getLogger("atomtrain.analysis")


def front_layers(front: Front, most_bytes: int) -> list[Layer]:
    """Return the layers before the language model.

    Args:
        front: All in one.
        most_bytes: Modules share a layer up to so many bytes of parameters, or up to those of the
            largest one: smaller layers would not make the largest slot smaller.
    """
    try:
        calls = recorded_calls(front)
    except AnalysisError as error:
        _log.info("what is before the language model stays one layer: %s", error)
        return [front.layer]
    sizes = [_bytes(calls.modules[call.path]) for call in calls.calls]
    most_bytes = max(most_bytes, *sizes)
    starts = [0]
    for index in range(1, len(sizes)):
        crossing = calls.crossing(index, len(sizes), index)
        may_cut = all(calls.calls[number].dense for number in crossing)
        if may_cut and sum(sizes[starts[-1] : index + 1]) > most_bytes:
            starts.append(index)
    if len(starts) == 1:
        return [front.layer]
    layers: list[Layer] = []
    for start, stop in itertools.pairwise([*starts, len(sizes)]):
        part = Part(front, calls, start, stop)
        number = 1 + sum(layer.name.partition("#")[0] == part.title for layer in layers)
        layers.append(part.layer(part.title if number == 1 else f"{part.title}#{number}"))
    return layers


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


class _EndError(Exception):
    """Ends the forward of a part."""


class Part(OwnCode):
    """Runs some of the modules before the language model; the last part returns what that gets."""

    def __init__(self, front: Front, calls: Calls, start: int, stop: int) -> None:
        super().__init__(front.model, front.inputs, front.example)
        self._found, self.calls, self._start, self._stop = front.found, calls, start, stop
        self.last = stop == len(calls.calls)
        own = [call.path for call in calls.calls[start:stop]]
        self.title = NAME if len(own) > 1 else path_in(front.model, calls.modules[own[0]])
        if self.last:
            self.hold_own()
            called = {call.path for call in calls.calls}
            own += [path for path in calls.modules if path not in called]
        modules = [*(calls.modules[path] for path in own), *between(front, calls.modules)]
        for number, module in enumerate(modules):
            self.add_module(str(number), module)
        self._absent = [path for path in calls.modules if path not in own]
        self._read = calls.crossing(start, stop, start)
        later = [] if self.last else calls.crossing(stop, len(calls.calls), stop)
        self._written = [index for index in later if index >= start]

    def layer(self, name: str) -> Layer:
        """Return the part as a layer."""
        reads = [*self.inputs.tensor_names, *self._names(self._start, self._read)]
        writes = self._names(self._stop, self._written)
        if self.last:
            writes = [f"{NAME}/{index}" for index in range(len(self.found.specs))]
        return Layer(name, self, tuple(reads), tuple(writes))

    def _names(self, cut: int, crossing: Sequence[int]) -> list[str]:
        """Return the names of the values that cross before a call, of which some calls made."""
        calls = self.calls.calls
        values = [
            f"{NAME}/{index}.{position}"
            for index in crossing
            for position in range(len(calls[index].specs))
        ]
        return [*([f"{NAME}/less/{cut}"] if cut else []), *values]

    def made(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        run = _Run(self.calls, values[0].device)
        tensors, travelled = values[: len(self.example)], list(values[len(self.example) :])
        if self._start:
            run.begin(self._start, self._read, travelled)
        with self._other_weights(values[0].device), self._replaced(run):
            if self.last:
                return super().made(tensors)
            with suppress(_EndError):
                self.reached(tensors)
        if len(run.less) != self._stop:
            raise unlike()
        return run.travelling(self._written)

    @contextmanager
    def _replaced(self, run: _Run) -> Iterator[None]:
        with ExitStack() as stack:
            for path in self.calls.modules:
                module = self.base.get_submodule(path)
                called = functools.partial(self._called, run, path, module.forward)
                stack.enter_context(instead(module, "forward", called))
            yield

    def _called(
        self, run: _Run, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        index = run.next(path)
        if index < self._start:
            return run.result(index)
        if index >= self._stop:
            raise _EndError
        result = forward(*args, **kwargs)
        run.ran(index, result, travels=index in self._written)
        return result

    def _other_weights(self, device: torch.device) -> AbstractContextManager[None]:
        """Have the weights of other parts be on the device."""
        absent = [self.base.get_submodule(path).modules() for path in self._absent]
        beside = [] if self.last else [self.base]
        return elsewhere(itertools.chain(*absent, beside), device)


class _Run:
    """One micro-batch in a part: what calls gave before, and what is to travel on."""

    def __init__(self, calls: Calls, device: torch.device) -> None:
        self._calls, self._device = calls.calls, device
        self._next = 0
        self.less: list[list[int]] = []
        """Of each call, how much smaller the sides of its results are than in the example."""
        self._results: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}

    def begin(self, start: int, read: Sequence[int], travelled: list[Tensor]) -> None:
        """Take what travelled here."""
        sides = [sum(len(spec.shape) for spec in call.specs) for call in self._calls[:start]]
        told = travelled.pop(0)
        # Without data the micro-batch is the example.
        less = iter([0] * sum(sides) if isinstance(told, FakeTensor) else told.tolist())
        self.less = [list(itertools.islice(less, count)) for count in sides]
        for index in read:
            orders, shapes = self._calls[index].orders, self._shapes(index)
            self._results[index] = [
                _unfolded(travelled.pop(0), shape, order)
                for shape, order in zip(shapes, orders, strict=True)
            ]

    def _shapes(self, index: int) -> list[list[int]]:
        less = iter(self.less[index])
        return [[side - next(less) for side in spec.shape] for spec in self._calls[index].specs]

    def next(self, path: str) -> int:
        """Return the number of a call that begins.

        Raises:
            ConfigError: the example has another one there.
        """
        index = self._next
        self._next += 1
        if index >= len(self._calls) or self._calls[index].path != path:
            raise unlike()
        return index

    def result(self, index: int) -> Any:
        """Return what an earlier call gave; nobody looks at what did not travel."""
        tensors = self._results.get(index)
        if tensors is None:
            tensors = []
            for spec, shape in zip(self._calls[index].specs, self._shapes(index), strict=True):
                value = math.nan if spec.dtype.is_floating_point else 0
                single = torch.full((), value, dtype=spec.dtype, device=self._device)
                tensors.append(single.expand(shape))
        return put_together(self._calls[index].skeleton, tensors)

    def ran(self, index: int, result: Any, *, travels: bool) -> None:
        """Note what a call gave.

        Raises:
            ConfigError: it is another thing than in the example.
        """
        call, tensors = self._calls[index], list[Tensor]()
        skeleton = taken_apart(result, tensors)
        known = [(len(spec.shape), spec.dtype) for spec in call.specs]
        if skeleton != call.skeleton or [(t.dim(), t.dtype) for t in tensors] != known:
            raise unlike()
        pairs = list(zip(call.specs, tensors, strict=True))
        self.less.append([a - b for s, t in pairs for a, b in zip(s.shape, t.shape, strict=True)])
        if travels:
            self._made[index] = [
                _flat(tensor, order, math.prod(spec.shape))
                for (spec, tensor), order in zip(pairs, call.orders, strict=True)
            ]

    def travelling(self, written: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what later parts read: how much smaller sides are, and results of some calls."""
        less = torch.tensor([side for call in self.less for side in call], device=self._device)
        return (less, *(tensor for index in written for tensor in self._made[index]))


def unlike() -> ConfigError:
    """Return the refusal of a micro-batch that the example does not stand for."""
    return ConfigError(
        "a micro-batch has the model call other modules before its language model than the "
        "example; swap the model with an example that has all of them"
    )


def _flat(tensor: Tensor, order: Sequence[int], size: int) -> Tensor:
    """Return a copy of a tensor as it lies in memory, with zeros behind it."""
    flat = tensor.permute(*order).reshape(-1)
    return nn.functional.pad(flat, (0, max(0, size - len(flat))))


def _unfolded(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    tensor = flat[: math.prod(shape)].view([shape[side] for side in order])
    return tensor.permute(*(order.index(side) for side in range(len(order))))
