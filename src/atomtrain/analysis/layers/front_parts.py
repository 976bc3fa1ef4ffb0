"""What a model does before its language model, as several layers of which each has some modules.

Each layer runs the model's own forward from its beginning, but of the modules that hold weights
only its own: those before give what they gave in an earlier layer, and at the first one behind,
the layer ends. What is between such modules is run again in each layer; it has no weights and
draws no random numbers.

What a module returns may have other shapes in every micro-batch, while values between layers have
fixed ones. So such a value travels flat, with zeros behind it up to the size that it has in the
example, and beside it how much smaller its sides are.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atomtrain.analysis.export.structure import NotPlainError, put_together, taken_apart
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.front import NAME, Front, OwnCode, instead
from atomtrain.analysis.layers.micro_batch import Spec
from atomtrain.errors import AnalysisError, ConfigError

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict
_RANDOM = torch.Tag.nondeterministic_seeded
_log = logging.getLogger("atomtrain.analysis")
_WEIGHT = -1
"""Stands for weights among the calls that a value was made of."""


class _Call(NamedTuple):
    """One of a module that holds weights."""

    path: str
    """Of the module, in what is around the language model."""
    reads: frozenset[int]
    """The earlier calls whose results it is given, perhaps changed between them."""
    skeleton: Any
    """Of its result."""
    specs: tuple[Spec, ...]
    """Of the tensors in that."""
    orders: tuple[tuple[int, ...], ...]
    """In which the sides of these lie in memory, the outermost first."""
    dense: bool
    """Whether they have no gaps."""


class _Calls(NamedTuple):
    """The calls of the example, in their order."""

    modules: Mapping[str, nn.Module]
    """All that hold weights, by path, those that are not called too."""
    calls: tuple[_Call, ...]
    read_last: frozenset[int]
    """The calls whose results the language model is given."""

    def crossing(self, start: int, stop: int, before: int) -> list[int]:
        """Return the calls before `before` whose results calls `start` to `stop` are given."""
        reads = [call.reads for call in self.calls[start:stop]]
        if stop == len(self.calls):
            reads.append(self.read_last)
        return sorted(index for index in frozenset().union(*reads) if index < before)


def front_layers(front: Front, most_bytes: int) -> list[Layer]:
    """Return the layers before the language model.

    Args:
        front: All in one.
        most_bytes: Modules share a layer up to so many bytes of parameters, or up to those of the
            largest one: smaller layers would not make the largest slot smaller.
    """
    try:
        calls = _Recorder(front).calls()
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
        part = _Part(front, calls, start, stop)
        number = 1 + sum(layer.name.partition("#")[0] == part.title for layer in layers)
        layers.append(part.layer(part.title if number == 1 else f"{part.title}#{number}"))
    return layers


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


class _EndError(Exception):
    """Ends the forward of a part."""


class _Part(OwnCode):
    """Runs some of the modules before the language model; the last part returns what that gets."""

    def __init__(self, front: Front, calls: _Calls, start: int, stop: int) -> None:
        super().__init__(front.model, front.inputs, front.example)
        self._found, self._calls, self._start, self._stop = front.found, calls, start, stop
        self.last = stop == len(calls.calls)
        own = [call.path for call in calls.calls[start:stop]]
        self.title = NAME if len(own) > 1 else _path_in(front.model, calls.modules[own[0]])
        if self.last:
            called = {call.path for call in calls.calls}
            own += [path for path in calls.modules if path not in called]
        between = _between(front, calls.modules)
        for number, module in enumerate([*(calls.modules[path] for path in own), *between]):
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
        calls = self._calls.calls
        values = [
            f"{NAME}/{index}.{position}"
            for index in crossing
            for position in range(len(calls[index].specs))
        ]
        return [*([f"{NAME}/less/{cut}"] if cut else []), *values]

    def made(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        run = _Run(self._calls, values[0].device)
        tensors, travelled = values[: len(self.example)], list(values[len(self.example) :])
        if self._start:
            run.begin(self._start, self._read, travelled)
        with self._other_weights(values[0].device), self._replaced(run):
            if self.last:
                return super().made(tensors)
            with suppress(_EndError):
                self.reached(tensors)
        if len(run.less) != self._stop:
            raise run.unlike()
        return run.travelling(self._written)

    @contextmanager
    def _replaced(self, run: _Run) -> Iterator[None]:
        with ExitStack() as stack:
            for path in self._calls.modules:
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

    @contextmanager
    def _other_weights(self, device: torch.device) -> Iterator[None]:
        """Have the weights of other parts be on the device: code asks for their place and type."""
        before = []
        for path in self._absent:
            for module in self.base.get_submodule(path).modules():
                for name, own in module._parameters.items():
                    if own is not None:
                        before.append((module._parameters, name, own))
        holders: Any
        try:
            for holders, name, own in before:
                holders[name] = torch.zeros((), dtype=own.dtype, device=device).expand(own.shape)
            yield
        finally:
            for holders, name, own in before:
                holders[name] = own


class _Run:
    """One micro-batch in a part: what calls gave before, and what is to travel on."""

    def __init__(self, calls: _Calls, device: torch.device) -> None:
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
            raise self.unlike()
        return index

    def unlike(self) -> ConfigError:
        return ConfigError(
            "a micro-batch has the model call other modules before its language model than the "
            "example; swap the model with an example that has all of them"
        )

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
            ConfigError: it is larger than in the example, or another thing.
        """
        call, tensors = self._calls[index], list[Tensor]()
        skeleton = taken_apart(result, tensors)
        known = [(len(spec.shape), spec.dtype) for spec in call.specs]
        if skeleton != call.skeleton or [(t.dim(), t.dtype) for t in tensors] != known:
            raise self.unlike()
        pairs = list(zip(call.specs, tensors, strict=True))
        self.less.append([a - b for s, t in pairs for a, b in zip(s.shape, t.shape, strict=True)])
        if not travels:
            return
        for spec, tensor in pairs:
            if tensor.numel() > math.prod(spec.shape):
                raise ConfigError(
                    f"the images of a micro-batch give {list(tensor.shape)} values in "
                    f"{call.path}, those of the example {list(spec.shape)}; swap the model with "
                    "its largest images as the example"
                )
        self._made[index] = [
            _flat(tensor, order, math.prod(spec.shape))
            for (spec, tensor), order in zip(pairs, call.orders, strict=True)
        ]

    def travelling(self, written: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what later parts read: how much smaller sides are, and results of some calls."""
        less = torch.tensor([side for call in self.less for side in call], device=self._device)
        return (less, *(tensor for index in written for tensor in self._made[index]))


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda side: -strides[side]))


def _flat(tensor: Tensor, order: Sequence[int], size: int) -> Tensor:
    """Return a tensor as it lies in memory, with zeros behind it."""
    flat = tensor.permute(*order).reshape(-1)
    return nn.functional.pad(flat, (0, size - len(flat)))


def _unfolded(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    tensor = flat[: math.prod(shape)].view([shape[side] for side in order])
    return tensor.permute(*(order.index(side) for side in range(len(order))))


class _Recorder(OwnCode):
    """Runs all on the example, without data, and notes which module is given whose results."""

    def __init__(self, front: Front) -> None:
        super().__init__(front.model, front.inputs, front.example)
        self._found = front.found
        self.front = front
        self._modules_by_path = _modules(front)
        self._calls: list[_Call] = []
        self._read_last: frozenset[int] = frozenset()

    def calls(self) -> _Calls:
        """Return what is called.

        Raises:
            AnalysisError: the modules cannot be layers of their own.
        """
        self.run_without_data()
        return _Calls(self._modules_by_path, tuple(self._calls), self._read_last)

    def made(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        origins = _Origins(self.parameters())
        with origins, ExitStack() as stack:
            for path, module in self._modules_by_path.items():
                called = functools.partial(self._called, origins, path, module.forward)
                stack.enter_context(instead(module, "forward", called))
            arguments, _ = self.reached(values)
            self._read_last = origins.of(arguments)
        return ()

    def _called(
        self,
        origins: _Origins,
        path: str,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if path in [call.path for call in self._calls]:
            raise AnalysisError(f"{path} is called twice")
        reads = origins.of((args, kwargs))
        with origins.inside():
            result = forward(*args, **kwargs)
        tensors: list[Tensor] = []
        skeleton = _taken_apart(result, tensors)
        origins.made(tensors, len(self._calls))
        specs = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        orders = tuple(map(_order_of, tensors))
        pairs = zip(tensors, orders, strict=True)
        dense = all(tensor.permute(order).is_contiguous() for tensor, order in pairs)
        self._calls.append(_Call(path, reads, skeleton, specs, orders, dense))
        return result


class _Origins(TorchDispatchMode):
    """Knows of which calls' results each tensor was made, by the memory in which it lies."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = False
        self._known: dict[int, frozenset[int]] = {}
        self._held: list[Tensor] = []  # else their memory would be that of others
        self.made(weights, _WEIGHT)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Look at no operations: a module's own."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def made(self, tensors: Iterable[Tensor], call: int) -> None:
        """Note what a call gave."""
        self._add(tensors, frozenset([call]))

    def of(self, value: Any) -> frozenset[int]:
        """Return the calls that something was made of.

        Raises:
            AnalysisError: weights have a part in it that no call had.
        """
        tensors: list[Tensor] = []
        _taken_apart(value, tensors)
        found = self._of(tensors)
        if _WEIGHT in found:
            raise AnalysisError("a weight is used outside of the module that holds it")
        return found

    def _of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        none = frozenset[int]()
        return none.union(*(self._known.get(_memory_of(t), none) for t in tensors))

    def _add(self, tensors: Iterable[Tensor], calls: frozenset[int]) -> None:
        for tensor in tensors:
            memory = _memory_of(tensor)
            self._known[memory] = self._known.get(memory, frozenset()) | calls
            self._held.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside:
            return result
        if _RANDOM in func.tags:
            raise AnalysisError("random numbers are drawn between its modules")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if calls := self._of(given):
            written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for described, value in zip(func._schema.arguments, args, strict=False):
                if described.alias_info is not None and described.alias_info.is_write:
                    written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            self._add(written, calls)
        return result


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    try:
        return taken_apart(value, tensors)
    except NotPlainError as error:
        raise AnalysisError(f"a {error} passes between its modules") from error


def _modules(front: Front) -> dict[str, nn.Module]:
    """Return the modules that hold weights, by their paths in what is around the language model.

    Those that hold others in containers are opened, but for elements of containers.
    """
    found: dict[str, nn.Module] = {}

    def look(path: str, module: nn.Module, *, element: bool) -> None:
        if next(module.parameters(), None) is None:
            return
        container = isinstance(module, _CONTAINERS)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        holds = any(isinstance(inner, _CONTAINERS) for inner in module.modules())
        if not container and (element or own or not holds):
            found[path] = module
            return
        for name, child in module.named_children():
            look(f"{path}.{name}", child, element=container)

    for name, child in front.base.named_children():
        if child is not front.language:
            look(name, child, element=False)
    embedding = front.input_embeddings
    found[_path_in(front.base, embedding)] = embedding
    return found


def _path_in(module: nn.Module, inner: nn.Module) -> str:
    """Return the path of a module within another one.

    Raises:
        AnalysisError: it is not there.
    """
    for path, each in module.named_modules():
        if each is inner:
            return str(path)
    raise AnalysisError(f"{type(inner).__name__} is outside of {type(module).__name__}")


def _between(front: Front, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules that hold buffers and no weights: all parts run them."""
    inside = {id(inner) for module in modules.values() for inner in module.modules()}
    return [
        module
        for module in front.modules()
        if id(module) not in inside and next(module.buffers(recurse=False), None) is not None
    ]
