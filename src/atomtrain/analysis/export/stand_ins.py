"""Traces one of several equal modules; its operations are then copied for the others.

While the model is traced, the others are stood in for by one operation each. A stand-in is used
only where the module would certainly do the same as the one that was traced: it is equal to it
(`equal_modules`), it is called with the same plain values and with tensors of the same shapes,
types and layout, nothing watches it, and its number, if it has one, is not looked at (reading the
number raises `UnequalError`, and the model is traced as a whole). Then copies take the places of
the stand-ins: the graph is what tracing every module would give, but for the names of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.equal_modules import Equal
from atomtrain.analysis.export.functions import tensors_of
from atomtrain.analysis.export.structure import NotPlainError, put_together, taken_apart

_LIBRARY = torch.library.Library("atomtrain", "FRAGMENT")
_LIBRARY.define("mark(Tensor[] given, int call) -> ()")
_LIBRARY.define("stand_in(Tensor[] given, Tensor[] like, int call, int same_as) -> Tensor[]")
MARK = torch.ops.atomtrain.mark.default
"""Stands before and after the operations of call number `call`; `given` are its tensors."""
STAND_IN = torch.ops.atomtrain.stand_in.default
"""Call number `call`, which does on `given` what call `same_as` did; its results are `like` that
call's."""

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_KEY = "L__self__"
"""How torch begins the keys of its stacks of module calls."""


def _mark(given: Sequence[Tensor], call: int) -> None:
    pass


def _stand_in(
    given: Sequence[Tensor], like: Sequence[Tensor], call: int, same_as: int
) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


_LIBRARY.impl("mark", _mark, "CompositeExplicitAutograd")
_LIBRARY.impl("stand_in", _stand_in, "CompositeExplicitAutograd")


class UnequalError(Exception):
    """Modules may do different things after all; the whole model has to be traced."""


def _looked_at(*_: Any, **__: Any) -> Any:
    raise UnequalError("a module's number decides what it does")


class _UnreadNumber:
    """In place of a module's number: may be handed on, but not looked at."""


def why_unequal(error: BaseException) -> str | None:
    """Return why modules may do different things after all; `None` if an error says nothing of it.

    Either `UnequalError` was raised, perhaps wrapped by torch on its way, or a function written in
    C refused a module's number, which it did not find to be one, and named its type.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        if isinstance(cause, UnequalError):
            return str(cause)
        if _UnreadNumber.__name__ in str(cause):
            return "a module's number is used where only a number can be"
        cause = cause.__cause__ or cause.__context__
    return None


for _name in (
    "int", "index", "float", "complex", "bool", "str", "repr", "format", "hash", "eq", "ne", "lt",
    "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv",
    "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow", "neg", "pos", "abs",
    "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
    "round", "trunc", "floor", "ceil", "getattr", "iter", "len", "contains", "call", "getitem",
):  # fmt: skip
    setattr(_UnreadNumber, f"__{_name}__", _looked_at)


class _Traced(NamedTuple):
    call: int
    fresh: list[Tensor]
    """Its results that were not given to it."""
    skeleton: Hashable
    """Of what it returned: slots are positions among `given`, then among `fresh`."""


class StandIns:
    """While entered, a model calls one of its equal modules for real, and stand-ins for the rest.

    One trace of the model's forward for each time it is entered.
    """

    def __init__(self, groups: Sequence[Equal]) -> None:
        self._groups = groups
        self.paths: list[str] = []
        """The module of each call, by the call's number."""
        self._traced: dict[Hashable, _Traced] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> StandIns:
        number = _UnreadNumber()
        for index, group in enumerate(self._groups):
            for path, module in zip(group.paths, group.modules, strict=True):
                for inside, name in group.counted:
                    self._put(module.get_submodule(inside), name, number)
                self._put(module, "forward", self._stood_in_for(index, path, module))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        attributes = vars(module)
        if name in attributes:
            own = attributes[name]
            self._undo.append(lambda: attributes.__setitem__(name, own))
        else:
            self._undo.append(lambda: attributes.__delitem__(name))
        attributes[name] = value

    def _stood_in_for(self, group: int, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            if path in self.paths:
                raise UnequalError(f"{path} is called twice")
            if any(getattr(inner, hooks) for inner in module.modules() for hooks in _HOOKS):
                raise UnequalError(f"{path} is watched")
            number = len(self.paths)
            self.paths.append(path)
            given: list[Tensor] = []
            skeleton = _taken_apart((args, kwargs), given, opaque=_UnreadNumber)
            if not given:
                raise UnequalError(f"{path} is called without tensors")
            key = (group, skeleton, _layout(given), torch.is_grad_enabled())
            if key in self._traced:
                return _stand_in_for(self._traced[key], number, given)
            MARK(given, number)
            result = forward(*args, **kwargs)
            self._traced[key] = traced = _traced(number, result, given)
            MARK(traced.fresh, number)
            return result

        return call


def _traced(number: int, result: Any, given: Sequence[Tensor]) -> _Traced:
    tensors = list(given)
    skeleton = _taken_apart(result, tensors)
    return _Traced(number, tensors[len(given) :], skeleton)


def _stand_in_for(traced: _Traced, number: int, given: Sequence[Tensor]) -> Any:
    made = STAND_IN(given, traced.fresh, number, traced.call)
    return put_together(traced.skeleton, [*given, *made])


def _layout(tensors: Sequence[Tensor]) -> Hashable:
    """Return what of tensors may decide which operations are done with them."""
    if any(t.layout is not torch.strided for t in tensors):
        raise UnequalError("tensors are sparse or nested")
    first: dict[int, int] = {}
    return tuple(
        (
            type(t), t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(),
            t.dtype, t.device, t.requires_grad,
            first.setdefault(t.untyped_storage()._cdata, len(first)),
        )
        for t in tensors
    )  # fmt: skip


def _taken_apart(value: Any, tensors: list[Tensor], opaque: type | None = None) -> Hashable:
    try:
        return taken_apart(value, tensors, opaque)
    except NotPlainError as error:
        raise UnequalError(f"{error} is not understood") from None


class _Call(NamedTuple):
    path: str
    given: tuple[fx.Node, ...]
    calls: list[fx.Node]
    """Its operations, in order."""


def repeat(graph: fx.Graph, sources: Mapping[str, fx.Node], paths: Sequence[str]) -> None:
    """Replace all stand-ins in the graph by copies of what they stand in for, in place.

    Args:
        graph: Flat, with marks and stand-ins.
        sources: The placeholder of each parameter and buffer, by its path in what was exported.
        paths: There, the path of the module of each call, by the call's number.

    Raises:
        UnequalError: what was traced uses more than its module's own tensors and what it was given.
    """
    traced: dict[int, _Call] = {}
    open_call: int | None = None
    for node in list(graph.nodes):
        if node.target is MARK:
            given, number = node.args
            if open_call is None:
                traced[number] = _Call(paths[number], tuple(given), [])
            open_call = None if open_call is not None else number
            graph.erase_node(node)
        elif node.target is STAND_IN:
            given, like, number, same_as = node.args
            call = traced[same_as]
            copies = _Copies(graph, sources, call, paths[number], given)
            copies.make(node)
            for user in list(node.users):
                user.replace_all_uses_with(copies.of(like[user.args[1]]))
                graph.erase_node(user)
            graph.erase_node(node)
        elif open_call is not None:
            traced[open_call].calls.append(node)


class _Copies:
    def __init__(
        self,
        graph: fx.Graph,
        sources: Mapping[str, fx.Node],
        call: _Call,
        path: str,
        given: Sequence[fx.Node],
    ) -> None:
        self._graph, self._sources, self._call, self._path = graph, sources, call, path
        self._paths = {node: name for name, node in sources.items()}
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        for own, other in zip(call.given, given, strict=True):
            self._correspond(own, other)

    def make(self, before: fx.Node) -> None:
        for node in self._call.calls:
            with self._graph.inserting_before(before):
                copied = self._graph.node_copy(node, self.of)
            copied.meta["val"] = fx.node.map_aggregate(node.meta.get("val"), self._value)
            copied.meta["nn_module_stack"] = self._stack(node)
            self._nodes[node] = copied

    def of(self, node: fx.Node) -> fx.Node:
        if node not in self._nodes:
            name = self._paths.get(node, "")
            inside = name.removeprefix(f"{self._call.path}.")
            if inside == name or f"{self._path}.{inside}" not in self._sources:
                raise UnequalError(f"{self._call.path} uses {node.name}, which is not its own")
            self._correspond(node, self._sources[f"{self._path}.{inside}"])
        return self._nodes[node]

    def _correspond(self, own: fx.Node, other: fx.Node) -> None:
        self._nodes[own] = other
        for one, two in zip(tensors_of(own), tensors_of(other), strict=True):
            storage = two.untyped_storage()
            key = one.untyped_storage()._cdata
            if self._storages.setdefault(key, storage)._cdata != storage._cdata:
                raise UnequalError(f"{own.name} and {other.name} share memory with different ones")

    def _value(self, value: Any) -> Any:
        """Return a tensor that lies in its storage as the given one does in its own."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        own = self._storages.get(storage._cdata)
        if own is None:
            own = torch.UntypedStorage(storage.nbytes(), device="meta")
            self._storages[storage._cdata] = own
        empty = torch.empty(0, dtype=value.dtype, device="meta")
        return empty.set_(own, value.storage_offset(), value.shape, value.stride())

    def _stack(self, node: fx.Node) -> dict[str, tuple[str, Any]]:
        before = self._call.path
        stack = {}
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if path != before and not path.startswith(f"{before}."):
                stack[key] = (path, kind)
                continue
            if not key.startswith(_KEY + before):
                raise UnequalError(f"calls are not named as expected: {key}")
            own = _KEY + self._path + key.removeprefix(_KEY + before)
            stack[own] = (self._path + path.removeprefix(before), kind)
        return stack
