"""What autograd saves of a layer for its backward, seen through its own hooks, on fake tensors.

A plan may keep these tensors on the device until backward, or let them wait on the host. Both are
counted by storage: several saved tensors are often views of one. Parameters and buffers are on the
device anyway and do not count. What goes to the host is less than what is kept: some of it is made
again from the rest (`rematerialization.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.costs.rematerialization import CHEAP, RematerializedStorage, Rematerializer
from atomtrain.analysis.costs.storages import LiveStorages
from atomtrain.analysis.export.structure import tensors_among


class SavedCost(NamedTuple):
    """What a layer's backward needs of its forward, for one micro-batch."""

    inner_bytes: int
    """Storages that are neither the layer's inputs nor its outputs."""
    sent_bytes: int
    """Of these, those that are not made again from what else is saved."""
    sent: int
    """Their number."""
    reads: tuple[bool, ...]
    """Which of the values that the layer reads are saved."""
    writes: tuple[bool, ...]
    """Which of the values that it writes are saved."""
    forward_bytes: int
    """Peak growth of forward with a graph if each saved tensor left the device at once."""
    backward_bytes: int
    """Peak growth of backward if each saved storage came (or was made again) when it is first
    needed, and went after its last use."""
    movable: bool
    """Whether all that backward needs passes through autograd's hooks. What a
    `torch.autograd.Function` keeps for itself does not."""
    remade_traffic_bytes: int = 0
    """What operations that backward does again read and write."""


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CHEAP:
            self.n_bytes += sum(tensor.nbytes for tensor in tensors_among(args, kwargs, result))
        return result


class _Storage:
    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.users = n_bytes, 0
        self.place: Tensor | None = None


class _Away:
    def __init__(
        self, storage: _Storage | RematerializedStorage, tensor: Tensor, *, argument: bool = False
    ) -> None:
        self.storage, self.device, self.argument = storage, tensor.device, argument
        self.dtype, self.offset = tensor.dtype, int(tensor.storage_offset())
        self.size, self.stride = tuple(tensor.shape), tensor.stride()


class SavedWatcher:
    """Lets a layer's saved tensors go at once, and brings each storage back for its first use.

    Used on fake tensors, inside the tracker that counts them.
    """

    def __init__(self, own: Sequence[Tensor], *, remake: bool = True) -> None:
        """`own` are parameters and buffers, which stay; with `remake` what can be made again is."""
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._known = LiveStorages[_Storage | RematerializedStorage]()
        self._sent: list[_Storage] = []
        self._remade: list[tuple[RematerializedStorage, int]] = []
        self._rematerializer = Rematerializer(self._find)
        self._noting: AbstractContextManager[Any] = (
            self._rematerializer if remake else nullcontext()
        )
        self._traffic, self._remaking = _Traffic(), False

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self._noting:
            yield

    def is_saved(self, value: Any) -> bool:
        """Return whether a value that is still alive was saved, and not made again."""
        return isinstance(value, Tensor) and isinstance(self._known.get(value), _Storage)

    def inner(self, outer: Sequence[Any]) -> list[int]:
        """Return the bytes of each storage that was saved and is in none of these values."""
        others = [self._known.get(value) for value in outer if isinstance(value, Tensor)]
        return [storage.n_bytes for storage in self._sent if storage not in others]

    @property
    def remade_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self._remade)

    @property
    def remade_traffic_bytes(self) -> int:
        """What was read and written so far to make them again."""
        return self._traffic.n_bytes

    def _find(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._own:
            return tensor.detach()
        storage = self._known.get(tensor)
        return None if storage is None else _Away(storage, tensor, argument=True)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._own:
            return tensor.detach()
        storage = self._known.get(tensor)
        if storage is None:
            storage = self._rematerializer.of(tensor)
            n_bytes = tensor.untyped_storage().nbytes()
            if storage is None:
                storage = _Storage(n_bytes)
                self._sent.append(storage)
            else:
                for argument in _arguments(storage):
                    argument.users += 1
                self._remade.append((storage, n_bytes))
            self._known.put(tensor, storage)
        storage.users += 1
        return _Away(storage, tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        storage = packed.storage
        if not packed.argument:
            storage.users -= 1
        # Not by `set_`: a fake tensor never lets go of a storage that it was given so.
        if isinstance(storage, RematerializedStorage):
            whole = self._made_again(storage)
        else:
            if storage.place is None:
                storage.place = torch.empty(
                    storage.n_bytes, dtype=torch.uint8, device=packed.device
                )
            fitting = storage.n_bytes // packed.dtype.itemsize * packed.dtype.itemsize
            whole = storage.place[:fitting].view(packed.dtype)
        back = whole.as_strided(packed.size, packed.stride, packed.offset)
        self._release(storage)
        return back

    def _made_again(self, storage: RematerializedStorage) -> Tensor:
        if self._remaking:  # as an argument of another one; the mode counts already
            return storage.operation.result(storage.index, self._unpack)
        self._remaking = True
        try:
            with self._traffic:
                return storage.operation.result(storage.index, self._unpack)
        finally:
            self._remaking = False

    def _release(self, storage: _Storage | RematerializedStorage) -> None:
        if storage.users:
            return
        if isinstance(storage, _Storage):
            storage.place = None
        elif storage.drop():
            for argument in _arguments(storage):
                argument.users -= 1
                self._release(argument)


def _arguments(rematerialized: RematerializedStorage) -> list[_Storage | RematerializedStorage]:
    return [at.storage for at in rematerialized.operation.arguments() if isinstance(at, _Away)]


def is_movable(roots: Sequence[Tensor]) -> bool:
    """Return whether a graph consists of torch's own operations only."""
    waiting = [root.grad_fn for root in roots]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return True
