"""Small storages cross the link together, within the same window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.execution.offload import Offload

KIB = 1 << 10
_FAST = 1e12


class Counted(EmulatedDevice):
    """Counts the jobs of each stream."""

    def __init__(self) -> None:
        self.jobs = Counter[str]()
        super().__init__(1 << 30, _FAST, lambda stream: self.jobs.update([stream]))


@pytest.fixture
def device() -> Iterator[Counted]:
    device = Counted()
    yield device
    device.close()


# Elements of what is saved, and how many jobs those are: what waits goes when it is an eighth of
# the window, 4 MiB at most; what is left at the turn goes alone.
CASES = (
    (1024 * KIB, (100, 7, 40 * KIB, 50, 50 * KIB, 3), 3),
    (1024 * KIB, (10 * KIB, 10 * KIB, 10 * KIB, 10 * KIB, 10 * KIB, 50 * KIB), 2),
    (1 << 30, (500 * KIB, 500 * KIB, 500 * KIB, 500 * KIB), 2),
)


@pytest.mark.parametrize(("window_bytes", "elements", "jobs"), CASES)
def test_small_ones_leave_and_come_back_together(
    device: Counted, window_bytes: int, elements: tuple[int, ...], jobs: int
) -> None:
    offload = Offload(device, HostPool(device), window_bytes)
    with device.computing():
        saved = [torch.randn(n) for n in elements]
        expected = [tensor.clone() for tensor in saved]
        parcel = offload.parcel()
        packed = [parcel.pack(tensor) for tensor in saved]
        saved.clear()
        offload.turn([parcel])
        found = [parcel.unpack(each, lambda _: _) for each in reversed(packed)]
        assert all(map(torch.equal, found, reversed(expected)))
        found.clear()
        parcel.close()
        offload.drain()
    assert device.jobs["save"] == device.jobs["fetch"] == jobs


def test_used_ones_do_not_come_again(device: Counted) -> None:
    offload = Offload(device, HostPool(device), 1)  # so nothing comes ahead
    with device.computing():
        small, large = torch.randn(10), torch.randn(40 * KIB)
        parcel = offload.parcel()
        packed = [parcel.pack(tensor) for tensor in (small, large)]
        offload.turn([parcel])
        for tensor, each in zip((large, small), reversed(packed), strict=True):
            assert torch.equal(parcel.unpack(each, lambda _: _), tensor)
        device.reset_peak()
        assert torch.equal(parcel.unpack(packed[0], lambda _: _), small)  # as a graph used twice
        parcel.close()
    assert device.peak_bytes() < 2 * large.nbytes


def test_small_ones_fill_the_window_too(device: Counted) -> None:
    window_bytes, n_bytes = 100 * KIB, 30 * KIB
    offload = Offload(device, HostPool(device), window_bytes)
    with device.computing():
        parcel = offload.parcel()
        packed = []
        for _ in range(20):
            packed.append(parcel.pack(torch.empty(n_bytes, dtype=torch.uint8)))
        offload.drain()
    assert device.peak_bytes() <= window_bytes + n_bytes


def test_what_autograd_lets_go_of_does_not_stay(device: Counted) -> None:
    """As the values of a sort of which only the order is used."""
    offload = Offload(device, HostPool(device), 1 << 20)
    with device.computing():
        value = torch.randn(10 * KIB, requires_grad=True)
        parcel = offload.parcel()

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else parcel.unpack(packed, unpack)

        with torch.autograd.graph.saved_tensors_hooks(parcel.pack, unpack):
            order = value.argsort()
            result = (value * 2).gather(0, order)
        offload.turn([parcel])
        result.backward(torch.ones(10 * KIB))
        left = [storage for storage in parcel.order() if storage.back is not None]
        assert parcel.order()
        assert not left
        parcel.close()
        offload.drain()
