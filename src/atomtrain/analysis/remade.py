"""Saved tensors that need not wait for backward: one cheap operation makes them again.

A normalisation's or an activation function's result is saved by the matrix product that follows,
and so is its argument, by the function itself. Such a result can be made again from the argument:
the same operation on the same bits, so with the same bits. That reads and writes memory once where
sending it to the host and back would take the link twice, which is much slower.

What is saved waits in many ways (in a place of a slot, on the host, not at all in an analysis), so
whoever packs saved tensors says how an argument will be found again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.storages import LiveStorages

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

Find = Callable[[Tensor], Any]
"""Returns what stands for an argument until backward, or `None` if it will not be there."""
Unpack = Callable[[Any], Tensor]
"""Returns the argument that something stands for."""


class Standing(NamedTuple):
    """Marks, among an operation's arguments, what stands for a tensor."""

    packed: Any


class Making:
    """An operation that backward does again, and its results while they are in use."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        """`args` and `kwargs` hold a `Standing` for each tensor."""
        self._func, self._args, self._kwargs = func, args, kwargs
        self._results: dict[int, Tensor] = {}
        self.needed: set[int] = set()
        """Positions of the results that are still to be used."""

    def arguments(self) -> list[Any]:
        """Return what stands for the saved tensors from which everything begins."""
        found: list[Any] = []

        def add(packed: Any) -> None:
            if isinstance(packed, _Step):
                found.extend(packed.making.arguments())
            else:
                found.append(packed)

        _replaced((self._args, self._kwargs), add)
        return found

    def result(self, index: int, unpack: Unpack) -> Tensor:
        """Return one of the results; all that are needed are made together."""
        if index not in self._results:

            def argument(packed: Any) -> Tensor:
                return packed.made(unpack) if isinstance(packed, _Step) else unpack(packed)

            args, kwargs = _replaced((self._args, self._kwargs), argument)
            made = self._func(*args, **kwargs)
            made = made if isinstance(made, tuple) else (made,)
            self._results = {i: made[i] for i in {*self.needed, index}}
        return self._results[index]

    def drop(self, index: int) -> None:
        """Let go of a result that nobody will use any more."""
        self.needed.discard(index)
        self._results.pop(index, None)


class _Step(NamedTuple):
    """Stands for a result that was not saved itself, on the way to one that was."""

    making: Making
    position: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def made(self, unpack: Unpack) -> Tensor:
        """Return it, made again."""
        made = self.making.result(self.position, unpack)
        if self.position not in self.making.needed:
            self.making.drop(self.position)
        return made.as_strided(self.size, self.stride, self.offset)


class _Note(NamedTuple):
    """How a storage was made."""

    making: Making
    position: int
    dtype: torch.dtype


class Remade:
    """A saved storage that is made again when backward needs it.

    Whoever takes it for a saved tensor's storage counts it as a user of each of its arguments,
    until it is dropped.
    """

    __slots__ = ("index", "making", "users")

    def __init__(self, making: Making, index: int) -> None:
        self.making, self.index = making, index
        self.users = 0
        """Saved tensors in it that backward has not asked for yet."""
        making.needed.add(index)

    def drop(self) -> bool:
        """Let go of it after its last use; return whether that was the first time."""
        first = self.index in self.making.needed
        self.making.drop(self.index)
        return first


class Recipes(TorchDispatchMode):
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

    def of(self, tensor: Tensor) -> Remade | None:
        """Return how the storage of a tensor can be made again, or `None`."""
        note = self._notes.get(tensor)
        return None if note is None else Remade(note.making, note.position)

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
            _replaced((args, kwargs), self._notes.drop, Tensor)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        complete = True

        def standing(tensor: Tensor) -> Standing:
            nonlocal complete
            packed = self._stands_for(tensor) if complete else None
            complete = packed is not None
            return Standing(packed)

        packed_args, packed_kwargs = _replaced((args, kwargs), standing, Tensor)
        if not complete:
            return
        making = Making(func, packed_args, packed_kwargs)
        for index, made in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(made, Tensor):
                self._notes.put(made, _Note(making, index, made.dtype))

    def _stands_for(self, tensor: Tensor) -> Any:
        packed = self._find(tensor)
        if packed is not None:
            return packed
        note = self._notes.get(tensor)
        if note is None or note.dtype != tensor.dtype:
            return None
        offset, stride = int(tensor.storage_offset()), tensor.stride()
        return _Step(note.making, note.position, offset, tensor.shape, stride)


_KINDS: dict[int, tuple[str, Any]] = {}
"""Kind of each operation that was met, by its id, and the operation."""


def _kind(func: Any) -> str:
    if func in CHEAP:
        return "cheap"
    return "writes" if func._schema.is_mutable else "other"


def _replaced(tree: Any, by: Callable[[Any], Any], kind: type = Standing) -> Any:
    """Return nested tuples, lists and dicts with each leaf of a kind replaced."""
    if isinstance(tree, kind):
        return by(tree.packed if isinstance(tree, Standing) else tree)
    if isinstance(tree, dict):
        return {key: _replaced(value, by, kind) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replaced(value, by, kind) for value in tree]
    # A `Standing` is a tuple too, but never met here when tensors are looked for.
    return tuple(_replaced(value, by, kind) for value in tree) if type(tree) is tuple else tree
