"""Saved tensors that need not wait for backward: one cheap operation makes them again.

A normalisation's or an activation function's result is saved by the matrix product that follows,
and so is its argument, by the function itself. Such a result can be made again from the argument:
the same operation on the same bits, so with the same bits. That reads and writes memory once where
sending it to the host and back would take the link twice, which is much slower.

What is saved waits in many ways (in a place of a slot, on the host, not at all in an analysis), so
whoever packs saved tensors says how an argument will be found again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.costs.storages import LiveStorages, View, seen_as, view_of

aten = torch.ops.aten
CHEAP = frozenset(
    {
        # Activation functions.
        aten.gelu.default,
        aten.silu.default,
        aten.relu.default,
        aten.leaky_relu.default,
        aten.elu.default,
        aten.hardswish.default,
        aten.mish.default,
        aten.softplus.default,
        aten.sigmoid.default,
        aten.tanh.default,
        # Normalisations, which save what they found about each row too.
        aten.native_layer_norm.default,
        aten._fused_rms_norm.default,
        # What gates, scalings and normalisations written by hand consist of.
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.sub.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.mean.dim,
        aten.rsqrt.default,
        aten.sqrt.default,
        aten.exp.default,
        # The same values in another type or order.
        aten._to_copy.default,
        aten.clone.default,
        aten.cat.default,
    }
)
"""Operations that draw nothing, read and write each element a few times, and whose results depend
on their arguments alone."""
DEEPEST = 32
"""So many cheap operations may come one after the other between what is saved and what is made
again: they pass over memory some 100 times, which takes about as long as the link both ways."""

Find = Callable[[Tensor], Any]
"""Returns what stands for an argument until backward, or `None` if it will not be there."""
Unpack = Callable[[Any], Tensor]
"""Returns the argument that something stands for."""


class Standing(NamedTuple):
    """Marks, among an operation's arguments, what stands for a tensor."""

    packed: Any


class RematerializedOperation:
    """An operation that backward does again, and its results while they are in use."""

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        nested: bool,
        several: bool,
        depth: int,
    ) -> None:
        """Take note of an operation.

        Args:
            func: What is done.
            args: Its arguments, a `Standing` for each tensor.
            kwargs: The same by name.
            nested: Whether some are in lists, or given by name.
            several: Whether it has several results.
            depth: How many operations come one after the other, this one included.
        """
        self.func, self.args, self.kwargs = func, args, kwargs
        self.nested, self.several, self.depth = nested, several, depth
        self._results: dict[int, Tensor] = {}
        self.needed: set[int] = set()
        """Positions of the results that are still to be used."""
        self.steps: list[Step] = []
        """The arguments that were not saved themselves."""
        self._saved: list[Any] = []
        if nested:
            replaced((args, kwargs), self._take)
        else:
            for one in args:
                if type(one) is Standing:
                    self._take(one.packed)
        self._arguments: Sequence[Any] | None = None

    def on(self, by: Callable[[Any], Any]) -> RematerializedOperation:
        """Return the same operation with `by(packed)` in place of what stands for each tensor."""
        args: Sequence[Any] = [
            Standing(by(one.packed)) if type(one) is Standing else one for one in self.args
        ]
        kwargs: Mapping[str, Any] = self.kwargs
        if self.nested:
            args, kwargs = replaced((self.args, self.kwargs), lambda packed: Standing(by(packed)))
        return RematerializedOperation(
            self.func, args, kwargs, nested=self.nested, several=self.several, depth=self.depth
        )

    def _take(self, packed: Any) -> None:
        (self.steps if isinstance(packed, Step) else self._saved).append(packed)

    def arguments(self) -> Sequence[Any]:
        """Return what stands for the saved tensors from which everything begins."""
        if self._arguments is None:  # asked for several times, and always the same
            order: dict[RematerializedOperation, None] = {}
            self._add_to(order)
            self._arguments = [packed for operation in order for packed in operation._saved]
        return self._arguments

    def result(self, index: int, unpack: Unpack) -> Tensor:
        """Return one of the results; all that are needed are made together.

        What leads to it is made once each, however many ways lead from it to the result, and is
        let go of after its last use.
        """
        if index in self._results:
            return self._results[index]
        order: dict[RematerializedOperation, None] = {}
        made: dict[_Result, Tensor] = {}
        self._add_to(order, made)
        uses: dict[_Result, int] = {(self, index): 1}
        for operation in order:
            for step in operation.steps:
                uses[step.result] = uses.get(step.result, 0) + 1

        def argument(packed: Any) -> Tensor:
            if not isinstance(packed, Step):
                return unpack(packed)
            view = seen_as(made[packed.result], packed.view)
            uses[packed.result] -= 1
            if not uses[packed.result]:
                del made[packed.result]
            return view

        for operation in order:
            made.update(operation._run(argument, uses))
        return made[self, index]

    def drop(self, index: int) -> None:
        self.needed.discard(index)
        self._results.pop(index, None)

    def _add_to(
        self, order: dict[RematerializedOperation, None], there: dict[_Result, Tensor] | None = None
    ) -> None:
        """Add this operation, and before it those that lead to it, each once.

        With `there` results that are there already are added to it, and what leads to them is not.
        """
        for step in self.steps:
            whole = step.operation._results.get(step.position)
            if there is not None and whole is not None:
                there[step.result] = whole
            elif step.operation not in order:
                step.operation._add_to(order, there)
        order[self] = None

    def _run(
        self, argument: Callable[[Any], Tensor], uses: Mapping[_Result, int]
    ) -> dict[_Result, Tensor]:
        """Do the operation; return the results that have uses. Those that are needed are kept."""
        args: Sequence[Any] = self.args
        kwargs: Mapping[str, Any] = self.kwargs
        if self.nested:
            args, kwargs = replaced((args, kwargs), argument)
        else:
            args = [argument(one.packed) if type(one) is Standing else one for one in args]
        made = self.func(*args, **kwargs)
        made = made if self.several else (made,)
        self._results.update((index, made[index]) for index in self.needed)
        return {(self, i): one for i, one in enumerate(made) if uses.get((self, i))}


_Result = tuple[RematerializedOperation, int]
"""An operation, and the position of one of its results."""


class Step(NamedTuple):
    """Stands for a result that was not saved itself, on the way to one that was."""

    operation: RematerializedOperation
    position: int
    view: View

    @property
    def result(self) -> _Result:
        return self.operation, self.position


class _Note(NamedTuple):
    operation: RematerializedOperation
    position: int
    dtype: torch.dtype


class RematerializedStorage:
    """A saved storage that is made again when backward needs it.

    Whoever takes it for a saved tensor's storage counts it as a user of each of its arguments,
    until it is dropped.
    """

    __slots__ = ("index", "operation", "users")

    def __init__(self, operation: RematerializedOperation, index: int) -> None:
        self.operation, self.index = operation, index
        self.users = 0
        """Saved tensors in it that backward has not asked for yet."""
        operation.needed.add(index)

    def drop(self) -> bool:
        """Let go of it after its last use; return whether that was the first time."""
        first = self.index in self.operation.needed
        self.operation.drop(self.index)
        return first


class _NotThereError(Exception):
    """An argument will not be there in backward."""


class Rematerializer(TorchDispatchMode):
    """While active, notes how results of cheap operations on saved tensors can be made again.

    It may take several such operations, one on the other's result. Autograd saves an operation's
    arguments before the operation runs. So whether they will be there in backward is known by the
    time that the result is.
    """

    def __init__(self, find: Find) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._find = find
        self._notes = LiveStorages[_Note]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it

    def of(self, tensor: Tensor) -> RematerializedStorage | None:
        """Return how the storage of a tensor can be made again, or `None`."""
        note = self._notes.get(tensor)
        return None if note is None else RematerializedStorage(note.operation, note.position)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # The entry keeps the operation alive, so its id stays its own; hashing it takes longer.
        known = _KINDS.get(id(func))
        if known is None:
            known = _KINDS[id(func)] = (_kind(func), func)
        if known[0] == "cheap":
            self._note(func, args, kwargs, result)
        elif known[0] == "writes":
            # Whatever it wrote to is no longer what an operation made.
            replaced((args, kwargs), self._notes.drop, Tensor)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        depth, nested = 1, False

        def standing(tensor: Tensor) -> Standing:
            nonlocal depth
            note = self._notes.get(tensor)
            if note is not None:
                depth = max(depth, note.operation.depth + 1)
            packed = self._stands_for(tensor, note)
            if packed is None or depth > DEEPEST:
                raise _NotThereError
            return Standing(packed)

        try:
            packed_args = []
            for one in args:  # mostly tensors and numbers: nothing to look into
                if isinstance(one, Tensor):
                    packed_args.append(standing(one))
                elif isinstance(one, list | tuple):
                    nested = True
                    packed_args.append(replaced(one, standing, Tensor))
                else:
                    packed_args.append(one)
            if any(isinstance(one, Tensor | list | tuple) for one in kwargs.values()):
                nested = True
                kwargs = replaced(kwargs, standing, Tensor)
        except _NotThereError:
            return
        several = isinstance(result, tuple)
        operation = RematerializedOperation(
            func, tuple(packed_args), kwargs, nested=nested, several=several, depth=depth
        )
        for index, made in enumerate(result if several else (result,)):
            if isinstance(made, Tensor):
                self._notes.put(made, _Note(operation, index, made.dtype))

    def _stands_for(self, tensor: Tensor, note: _Note | None) -> Any:
        packed = self._find(tensor)
        if packed is not None:
            return packed
        if note is None or note.dtype != tensor.dtype:
            return None
        return Step(note.operation, note.position, view_of(tensor))


_KINDS: dict[int, tuple[str, Any]] = {}
"""Kind of each operation that was met, by its id, and the operation."""


def _kind(func: Any) -> str:
    if func in CHEAP:
        return "cheap"
    return "writes" if func._schema.is_mutable else "other"


def replaced(tree: Any, by: Callable[[Any], Any], kind: type | tuple[type, ...] = Standing) -> Any:
    """Return nested tuples, lists and dicts with each leaf of a kind replaced."""
    if isinstance(tree, kind):
        return by(tree.packed if isinstance(tree, Standing) else tree)
    if isinstance(tree, dict):
        return {key: replaced(value, by, kind) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, by, kind) for value in tree]
    # A `Standing` is a tuple too, but never met here when tensors are looked for.
    return tuple(replaced(value, by, kind) for value in tree) if type(tree) is tuple else tree
