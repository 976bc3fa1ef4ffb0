"""Host buffers: small ones share slabs and nothing else, and all are used again."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.engine.devices import host_memory
from atomtrain.engine.devices.host_memory import SLAB_BYTES, HostPool, aligned_empty
from atomtrain.engine.devices.processor import HostDevice


class Counting(HostDevice):
    """Notes what is allocated."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.sizes: list[int] = []

    def host_empty(self, n_bytes: int) -> Tensor:
        self.sizes.append(n_bytes)
        return super().host_empty(n_bytes)


@pytest.fixture
def device() -> Iterator[Counting]:
    opened = Counting()
    yield opened
    opened.close()


def test_large_memory_asks_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def call(name: str) -> Any:
        assert name == "madvise"
        return lambda address, size, what: asked.append((address.value, size.value, what))

    monkeypatch.setattr(host_memory, "_library_call", call)
    aligned_empty(1 << 20)
    assert asked == [], "it would be a part of one"
    memory = aligned_empty(8 << 20)
    assert asked == [(memory.data_ptr(), 8 << 20, mmap.MADV_HUGEPAGE)]


def test_small_buffers_lie_side_by_side(device: Counting) -> None:
    pool = HostPool(device)
    buffers = [pool.take(size) for size in (1, 511, 512, 513, 4096, 0, 100_000)]
    assert device.sizes == [SLAB_BYTES]
    places = [(b.data_ptr(), b.data_ptr() + b.numel()) for b in buffers if b.numel()]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    first = places[0][0]
    assert all((start - first) % 512 == 0 for start, _ in places)
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    assert [b.unique().tolist() for b in buffers] == [[0], [1], [2], [3], [4], [], [6]]


def test_a_full_slab_is_followed_by_another(device: Counting) -> None:
    pool = HostPool(device)
    each = SLAB_BYTES // 4
    buffers = [pool.take(each) for _ in range(9)]
    assert device.sizes == [SLAB_BYTES] * 3
    assert len({buffer.data_ptr() for buffer in buffers}) == 9


def test_what_is_left_of_a_slab_serves_smaller_buffers(device: Counting) -> None:
    pool = HostPool(device)
    quarter, small = SLAB_BYTES // 4, SLAB_BYTES // 16
    buffers = [pool.take(size) for _ in range(4) for size in (quarter, quarter, quarter, small)]
    buffers += [pool.take(small) for _ in range(12)]
    assert device.sizes == [SLAB_BYTES] * 4
    assert sum(buffer.numel() for buffer in buffers) == 4 * SLAB_BYTES
    places = sorted((b.data_ptr(), b.data_ptr() + b.numel()) for b in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_large_buffers_have_memory_of_their_own(device: Counting) -> None:
    pool = HostPool(device)
    pool.take(SLAB_BYTES), pool.take(3 * SLAB_BYTES)
    assert device.sizes == [SLAB_BYTES, 3 * SLAB_BYTES]


def test_what_is_given_back_is_used_again(device: Counting) -> None:
    pool = HostPool(device)
    before = {size: pool.take(size) for size in (700, 2 * SLAB_BYTES)}
    for buffer in before.values():
        pool.give(buffer)
    for size, buffer in before.items():
        assert pool.take(size) is buffer
    assert pool.total_bytes == 700 + 2 * SLAB_BYTES
    assert pool.take(700) is not before[700]
    assert pool.take(700).dtype is torch.uint8
