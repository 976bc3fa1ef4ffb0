"""Blocks of a GPU's memory.

A block is a storage on torch's device `meta`, which has a size and no data, and memory of the
processor behind it. What is allocated or freed is filled with ones: floats are then no numbers, and
indices are out of range. Freed memory is spoilt in the order of the stream that allocated it, since
PyTorch's allocator would give it to that stream's next tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.software_gpu.order import Queue, Scheduler
from tests.support.software_gpu.races import Accesses, Range

_ALIGNED_BYTES = 512
SPOILT = 0xFF


class Block:
    """What is behind one storage."""

    def __init__(
        self,
        number: int,
        device: torch.device,
        queue: Queue,
        storage: torch.UntypedStorage,
        report: Callable[[str], None],
    ) -> None:
        n_bytes = storage.nbytes()
        self.device, self.queue = device, queue
        self.storage = weakref.ref(storage)
        self.counted_bytes = -(-n_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.data = torch.full((n_bytes,), SPOILT, dtype=torch.uint8)
        self.accesses = Accesses(f"block {number} of {n_bytes} bytes", report)


class Memory:
    """The memory of one GPU."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.fraction = 1.0
        self.used_bytes = self.peak_bytes = 0
        self.retries = 0

    def take(self, n_bytes: int) -> None:
        """Count an allocation.

        Raises:
            OutOfMemoryError: of torch; the process may not have as much.
        """
        most_bytes = int(self.fraction * self.total_bytes)
        if self.used_bytes + n_bytes > most_bytes:
            self.retries += 1  # what PyTorch does before it gives up
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {n_bytes} bytes. {self.used_bytes} bytes "
                f"are in use of {most_bytes} allowed."
            )
        self.used_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class Blocks:
    """The blocks of all GPUs, found by any tensor in them."""

    def __init__(
        self, scheduler: Scheduler, memories: list[Memory], report: Callable[[str], None]
    ) -> None:
        self._scheduler, self._memories, self._report = scheduler, memories, report
        self._blocks: dict[int, Block] = {}
        self._dead: deque[int] = deque()
        self._made = 0

    def adopt(self, meta: Tensor, device: torch.device, queue: Queue) -> None:
        """Allocate what is behind a tensor on `meta`, in the order of a stream."""
        self.collect()
        storage = meta.untyped_storage()
        key = storage._cdata
        assert key not in self._blocks
        self._made += 1
        block = Block(self._made, device, queue, storage, self._report)
        block.accesses.allocated(queue.number, queue.clock, storage.nbytes())
        self._memories[device.index].take(block.counted_bytes)
        self._blocks[key] = block
        # torch keeps one object for a storage as long as the storage lives. The memory may go in
        # the middle of anything, hence only a note.
        weakref.finalize(storage, self._dead.append, key).atexit = False

    def of(self, tensor: Tensor) -> Block:
        """Return what is behind a tensor."""
        return self._blocks[tensor.untyped_storage()._cdata]

    def device_of(self, storage: torch.UntypedStorage) -> torch.device | None:
        """Return the GPU that has a storage, if one has."""
        block = self._alive(storage)
        return None if block is None else block.device

    def knows(self, meta: Tensor) -> bool:
        """Return whether the tensor lies in a block: it is a view of something."""
        return self._alive(meta.untyped_storage()) is not None

    def _alive(self, storage: torch.UntypedStorage) -> Block | None:
        # The address may have been a dead storage's, of which nobody took note yet.
        block = self._blocks.get(storage._cdata)
        return None if block is None or block.storage() is None else block

    def collect(self) -> None:
        """Free what nobody holds any more."""
        with self._scheduler.lock:
            while self._dead:
                block = self._blocks.pop(self._dead.popleft())
                self._memories[block.device.index].used_bytes -= block.counted_bytes
                data = block.data
                task = self._scheduler.submit(block.queue, lambda data=data: _spoil(data))
                block.accesses.check_freed(block.queue.number, task.clock)


def _spoil(data: Tensor) -> None:
    data.fill_(SPOILT)


def raw_of(data: Tensor, tensor: Tensor) -> Tensor:
    """Return the place of a tensor in its block's data, as a tensor of the processor."""
    raw = torch.empty(0, dtype=tensor.dtype)
    return raw.set_(data.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def range_of(tensor: Tensor) -> Range:
    """Return the bytes of its storage that a tensor spans."""
    size = tensor.element_size()
    low = tensor.storage_offset()
    if tensor.numel() == 0:
        return Range(low * size, low * size)
    last = sum(s * (n - 1) for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return Range(low * size, (low + last + 1) * size)
