"""Calls of `torch.autograd.Function`, and what all operations of a graph do to storages.

A graph that autograd's operations are written down in would hold the forward of such a function,
and lose its backward. So while a model is traced, a call is written down as a whole; running the
graph calls the function itself, whose context, saved tensors and gradients are then autograd's own.
That is the same only if the call is a function of the tensors that it is given. Its forward is
watched on tensors without data for everything else, which is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.analysis.export.structure import (
    NotPlainError,
    put_together,
    taken_apart,
    tensors_among,
)
from atomtrain.errors import AnalysisError, reason_of

_REGISTERED = "GeneratedBackwardFor"
"""Functions of this name belong to operations that graphs keep, with their backward."""
_RANDOM = torch.Tag.nondeterministic_seeded
_LIBRARY = torch.library.Library("atomtrain", "FRAGMENT")
_LIBRARY.define("function(Tensor[] given, int call) -> Tensor[]")
FUNCTION = torch.ops.atomtrain.function.default
"""While a model is traced: call number `call` of a function on the tensors that are `given`."""


class FunctionCall:
    """A call of a `torch.autograd.Function` with other tensors: `call(tensors) -> tensors`.

    What prints alike does alike, as with operations of torch.
    """

    def __init__(self, function: type[torch.autograd.Function], skeleton: Hashable) -> None:
        """`skeleton` is that of the positional and the named arguments."""
        self._function, self._skeleton = function, skeleton
        # Code that is generated for a graph names what it calls.
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = function.__module__
        self.results: Hashable = None
        """The skeleton of what it returns, once it was called."""
        self.is_random = False
        """Whether its forward draws random numbers."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        args, kwargs = put_together(self._skeleton, tensors)
        result = self._function.apply(*args, **kwargs)
        self.results = taken_apart(result, made)
        return made

    def __repr__(self) -> str:
        of = f"{self.__module__}.{self.__name__}"
        return f"<{of} {id(self._function):x} {self._skeleton!r}>"


class Functions:
    def __init__(self) -> None:
        self.calls: list[FunctionCall] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Write down calls of functions as `FUNCTION` within a trace.

        Raises:
            AnalysisError: a call that is not a function of its tensors alone.
        """
        original = torch.autograd.Function.__dict__["apply"]

        def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if _watches or function.__name__.startswith(_REGISTERED):
                return original.__get__(None, function)(*args, **kwargs)
            return self._call(function, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        _traces.append(self)
        try:
            yield
        finally:
            _traces.pop()
            torch.autograd.Function.apply = original  # type: ignore[method-assign]

    def _call(
        self, function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch._C._are_functorch_transforms_active():
            # Not yet refused for good: a model that knows it is traced may do without.
            raise RuntimeError(
                f"torch.vmap maps {function.__name__}, a torch.autograd.Function, which cannot be "
                "written down as a whole"
            )
        given: list[Tensor] = []
        try:
            call = FunctionCall(function, taken_apart((args, kwargs), given))
        except NotPlainError as error:
            _refuse(function, f"takes a {error}, not only tensors and plain values")
        if not given:
            _refuse(function, "takes no tensors")
        self.calls.append(call)
        made = FUNCTION(given, len(self.calls) - 1)
        return put_together(call.results, made)

    def place(self, node: fx.Node) -> None:
        if node.target is FUNCTION:
            given, number = node.args
            assert isinstance(number, int)
            node.target, node.args = self.calls[number], (given,)


_traces: list[Functions] = []
"""That of what is traced now, last."""
_watches: list[_Watch] = []
"""That of the function whose forward runs now, if one does."""


def _refuse(function: type, why: str) -> NoReturn:
    raise AnalysisError(
        f"forward uses {function.__name__}, a torch.autograd.Function that {why}; register it as "
        f"an operation (torch.library.custom_op), {MANUAL}"
    )


class _Watch(TorchDispatchMode):
    """Sees what the forward of a function does with tensors, and refuses what nobody could know."""

    def __init__(self, function: type, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False
        self._function, self._alive = function, list(given)
        self._given = {_storage(tensor) for tensor in given}
        self._known = set(self._given)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tensors_among(args, kwargs)
        if any(_storage(tensor) not in self._known for tensor in given):
            _refuse(self._function, "uses a tensor that it is not given")
        named = zip(func._schema.arguments, args, strict=False)
        written = [value for described, value in named if _is_written(described)]
        written += [
            (kwargs or {}).get(described.name)
            for described in func._schema.arguments
            if _is_written(described)
        ]
        for tensor in tensors_among(written):
            if _storage(tensor) in self._given:
                _refuse(self._function, "changes a tensor that it is given")
        self.is_random |= _RANDOM in func.tags
        result = func(*args, **(kwargs or {}))
        made = tensors_among(result)
        self._alive += made  # the keys of storages that are freed would be given again
        self._known |= {_storage(tensor) for tensor in made}
        return result


def _is_written(described: torch.Argument) -> bool:
    return described.alias_info is not None and described.alias_info.is_write


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _attributes(function: type) -> dict[str, Any]:
    """Return what forward could change of a function itself."""
    return {
        name: len(value) if isinstance(value, list | dict | set) else value
        for name, value in vars(function).items()
        if isinstance(value, bool | int | float | str | list | dict | set | None)
    }


@torch.library.register_fake("atomtrain::function")  # type: ignore[untyped-decorator]
def _without_data(given: Sequence[Tensor], call: int) -> list[Tensor]:
    """Return what the function returns but for the data, and note what else is known of it."""
    noted = _traces[-1].calls[call]
    function = noted._function
    watch = _Watch(function, given)
    before = _attributes(function)
    _watches.append(watch)
    try:
        with watch, torch.no_grad():
            made = noted(given)
    except AnalysisError:
        raise
    except NotPlainError as error:
        _refuse(function, f"returns a {error}, not only tensors and plain values")
    except Exception as error:  # noqa: BLE001 (whatever its forward raises)
        _refuse(function, f"does not run on tensors without data ({reason_of(error)})")
    finally:
        _watches.pop()
    if _attributes(function) != before:
        _refuse(function, "changes attributes of its class")
    storages = [_storage(tensor) for tensor in (*given, *made)]
    if len({*storages[len(given) :]} - {*storages[: len(given)]}) < len(made):
        _refuse(function, "returns a view of what it is given, or one tensor twice")
    noted.is_random = watch.is_random
    return made


# Their schemas do not say that they write running statistics (arguments 3 and 4) when argument 5
# says so.
_STATISTICS = ("aten::batch_norm", "aten::instance_norm")


def tensors_of(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, tuple | list) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def storages_of(node: fx.Node) -> frozenset[int]:
    """Return a key for each storage that a node's result lies in."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors_of(node))


def n_bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's result if it were stored densely."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))


def is_random(node: fx.Node) -> bool:
    """Return whether the operation may advance a random number generator."""
    target = node.target
    if isinstance(target, FunctionCall):
        return target.is_random
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # Composite operations carry no tag: dropout, and attention with dropout.
    return _RANDOM in target.tags or "dropout" in target.name() or _has_dropout(node)


def _has_dropout(node: fx.Node) -> bool:
    return bool(argument(node, "dropout_p") or argument(node, "dropout"))


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of this name of an operation, `None` if it has none or it is not set."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    for position, described in enumerate(target._schema.arguments):
        if described.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return None


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose tensors the operation changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    written: list[Any] = []
    for position, described in enumerate(target._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            if position < len(node.args):
                written.append(node.args[position])
            else:
                written.append(node.kwargs.get(described.name))
    if target.name() in _STATISTICS and len(node.args) > 5 and node.args[5]:
        written += node.args[3:5]
    found: list[fx.Node] = []
    fx.node.map_arg(written, found.append)
    return found


def live_nodes(graph: fx.Graph, kept: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the calls that matter, in order: for the output, for `kept` buffers, for randomness.

    A call that only advances a random number generator matters: what follows draws other numbers
    without it.
    """
    storages = {key for node in kept for key in storages_of(node)}
    needed: set[fx.Node] = set()
    live = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            needed.update(node.all_input_nodes)
        elif node.op == "call_function":
            writes = any(storages & storages_of(target) for target in written_by(node))
            if not (node in needed or writes or is_random(node)):
                continue
            live.append(node)
            needed.update(node.all_input_nodes)
        else:
            continue
        storages.update(key for source in node.all_input_nodes for key in storages_of(source))
    return live[::-1]
