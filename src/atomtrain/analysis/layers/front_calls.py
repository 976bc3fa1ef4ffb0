"""Which modules a model calls before its language model, and which is given whose results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.export.structure import NotPlainError, taken_apart, tensors_among
from atomtrain.analysis.layers.front import Front, OwnCode, instead
from atomtrain.analysis.layers.micro_batch import Spec
from atomtrain.errors import AnalysisError

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict
_RANDOM = torch.Tag.nondeterministic_seeded
_WEIGHT, _OWN_WEIGHT = -1, -2
"""Stand for weights among the calls that a value was made of: of modules, and those beside them."""


class Call(NamedTuple):
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


class Calls(NamedTuple):
    """The calls of the example, in their order."""

    modules: Mapping[str, nn.Module]
    """All that hold weights, by path, those that are not called too."""
    calls: tuple[Call, ...]
    read_last: frozenset[int]
    """The calls whose results the language model is given."""

    def crossing(self, start: int, stop: int, before: int) -> list[int]:
        """Return the calls before `before` whose results calls `start` to `stop` are given."""
        reads = [call.reads for call in self.calls[start:stop]]
        if stop == len(self.calls):
            reads.append(self.read_last)
        return sorted(index for index in frozenset().union(*reads) if index < before)


def recorded_calls(front: Front) -> Calls:
    """Run all before the language model on the example, without data, and note what is called.

    Raises:
        AnalysisError: the modules cannot be layers of their own: between them are weights, random
            numbers or objects, or one is called twice.
    """
    recorder = _Recorder(front)
    recorder.run_without_data()
    return Calls(recorder.modules_by_path, tuple(recorder.calls), recorder.read_last)


class _Recorder(OwnCode):
    """Notes which module is given whose results."""

    def __init__(self, front: Front) -> None:
        super().__init__(front.model, front.inputs, front.example)
        self._found = front.found
        self.front = front
        self.modules_by_path = _modules(front)
        self.hold_own()
        self.calls: list[Call] = []
        self.read_last: frozenset[int] = frozenset()

    def made(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        between_buffers = [
            (buffer, buffer._version)
            for module in between(self.front, self.modules_by_path)
            for buffer in module.buffers(recurse=False)
        ]
        origins = _Origins(self.front.parameters(), self.parameters(recurse=False))
        with origins, ExitStack() as stack:
            for path, module in self.modules_by_path.items():
                called = functools.partial(self._called, origins, path, module.forward)
                stack.enter_context(instead(module, "forward", called))
            arguments, _ = self.reached(values)
            self.read_last = origins.of(arguments, own_weights=True)
        if any(buffer._version != before for buffer, before in between_buffers):
            raise AnalysisError("a buffer is changed between its modules")
        return ()

    def _called(
        self,
        origins: _Origins,
        path: str,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if path in [call.path for call in self.calls]:
            raise AnalysisError(f"{path} is called twice")
        reads = origins.of((args, kwargs))
        with origins.inside():
            result = forward(*args, **kwargs)
        tensors: list[Tensor] = []
        skeleton = _taken_apart(result, tensors)
        origins.made(tensors, len(self.calls))
        specs = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        orders = tuple(map(_order_of, tensors))
        pairs = zip(tensors, orders, strict=True)
        dense = all(tensor.permute(order).is_contiguous() for tensor, order in pairs)
        self.calls.append(Call(path, reads, skeleton, specs, orders, dense))
        return result


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda side: -strides[side]))


class _Origins(TorchDispatchMode):
    """Knows of which calls' results each tensor was made, by the memory in which it lies."""

    def __init__(self, weights: Iterable[Tensor], own_weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = False
        self._known: dict[int, frozenset[int]] = {}
        self._held: list[Tensor] = []  # else their memory would be that of others
        self.made(weights, _WEIGHT)
        self.made(own_weights, _OWN_WEIGHT)

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

    def of(self, value: Any, *, own_weights: bool = False) -> frozenset[int]:
        """Return the calls that something was made of; `own_weights` may have a part in it.

        Raises:
            AnalysisError: weights have a part in it that no call had.
        """
        tensors: list[Tensor] = []
        _taken_apart(value, tensors)
        found = self._of(tensors)
        if _WEIGHT in found or (_OWN_WEIGHT in found and not own_weights):
            raise AnalysisError("a weight is used outside of the module that holds it")
        return found - {_OWN_WEIGHT}

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
        given = tensors_among(args, kwargs)
        if calls := self._of(given):
            written = tensors_among(result)
            for described, value in zip(func._schema.arguments, args, strict=False):
                if described.alias_info is not None and described.alias_info.is_write:
                    written += tensors_among(value)
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
    found[path_in(front.base, embedding)] = embedding
    return found


def path_in(module: nn.Module, inner: nn.Module) -> str:
    """Return the path of a module within another one.

    Raises:
        AnalysisError: it is not there.
    """
    for path, each in module.named_modules():
        if each is inner:
            return str(path)
    raise AnalysisError(f"{type(inner).__name__} is outside of {type(module).__name__}")


def between(front: Front, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules that hold buffers and no weights: all parts run them."""
    inside = {id(inner) for module in modules.values() for inner in module.modules()}
    return [
        module
        for module in front.modules()
        if id(module) not in inside and next(module.buffers(recurse=False), None) is not None
    ]
