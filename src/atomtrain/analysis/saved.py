"""What autograd saves of a layer for its backward, seen through its own hooks, on fake tensors.

A plan may keep these tensors on the device until backward, or let them wait on the host. Both are
counted by storage: several saved tensors are often views of one. Parameters and buffers are on the
device anyway and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.storages import LiveStorages


class SavedCost(NamedTuple):
    """What a layer's backward needs of its forward, for one micro-batch."""

    inner_bytes: int
    """Storages that are neither the layer's inputs nor its outputs."""
    inner: int
    """Their number."""
    reads: tuple[bool, ...]
    """Which of the values that the layer reads are saved."""
    writes: tuple[bool, ...]
    """Which of the values that it writes are saved."""
    forward_bytes: int
    """Peak growth of forward with a graph if each saved tensor left the device at once."""
    backward_bytes: int
    """Peak growth of backward if each saved storage came when it is first needed, and went after
    its last use."""
    movable: bool
    """Whether all that backward needs passes through autograd's hooks. What a
    `torch.autograd.Function` keeps for itself does not."""


class _Storage:
    """A storage that left and may come back."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.users = n_bytes, 0
        self.place: Tensor | None = None


class _Away(NamedTuple):
    """Stands for a saved tensor."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device


class SavedWatcher:
    """Lets a layer's saved tensors go at once, and brings each storage back for its first use.

    Used on fake tensors, inside the tracker that counts them.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        """`own` are parameters and buffers, which stay."""
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._known = LiveStorages[_Storage]()
        self._all: list[_Storage] = []

    def hooks(self) -> Any:
        """Return the context in which the layer runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def storage_of(self, value: Any) -> _Storage | None:
        """Return the saved storage in which a value lies that is still alive."""
        return self._known.get(value) if isinstance(value, Tensor) else None

    def inner(self, outer: Sequence[Any]) -> list[_Storage]:
        """Return the storages that are in none of these values."""
        others = [self.storage_of(value) for value in outer]
        return [storage for storage in self._all if storage not in others]

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._own:
            return tensor.detach()
        storage = self._known.get(tensor)
        if storage is None:
            storage = _Storage(tensor.untyped_storage().nbytes())
            self._known.put(tensor, storage)
            self._all.append(storage)
        storage.users += 1
        return _Away(
            storage, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape),
            tensor.stride(), tensor.device,
        )  # fmt: skip

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        storage: _Storage = packed.storage
        if storage.place is None:
            storage.place = torch.empty(storage.n_bytes, dtype=torch.uint8, device=packed.device)
        storage.users -= 1
        whole = storage.n_bytes // packed.dtype.itemsize * packed.dtype.itemsize
        # Not by `set_`: a fake tensor never lets go of a storage that it was given so.
        back = storage.place[:whole].view(packed.dtype)
        back = back.as_strided(packed.size, packed.stride, packed.offset)
        if not storage.users:
            storage.place = None
        return back


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
