"""What the CUDA device does that needs no GPU to be checked: caps, workspaces, pinned memory."""

from __future__ import annotations

import gc

import pytest
import torch

from atomtrain.engine.devices.cuda import Caps, CudaDevice, workspace_bytes
from atomtrain.errors import StreamError
from atomtrain.planning.plan.disk import PAGE_BYTES

TOTAL_BYTES = 1000


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What this process may take of two GPUs, as torch would know it."""
    known = {0: 1.0, 1: 0.5}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (TOTAL_BYTES, TOTAL_BYTES))
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", known.__getitem__)
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction",
        lambda fraction, index: known.__setitem__(index, fraction),
    )
    return known


def test_budgets_of_open_devices_add_up_and_the_last_one_leaves_all(
    fractions: dict[int, float],
) -> None:
    caps = Caps()
    caps.add(0, 100)
    assert fractions == {0: 0.1, 1: 0.5}
    caps.add(0, 200)
    assert fractions[0] == pytest.approx(0.3)
    caps.remove(0, 100)  # in whatever order they are closed
    assert fractions[0] == pytest.approx(0.2)
    caps.remove(0, 200)
    assert fractions == {0: 1.0, 1: 0.5}
    caps.add(0, 300)
    assert fractions[0] == pytest.approx(0.3)


def test_a_cap_of_the_caller_is_there_again(fractions: dict[int, float]) -> None:
    caps = Caps()
    caps.add(1, 900)
    assert fractions[1] == pytest.approx(0.9)
    caps.add(1, 900)
    assert fractions[1] == 1.0, "all there is"
    caps.remove(1, 900)
    caps.remove(1, 900)
    assert fractions == {0: 1.0, 1: 0.5}


def test_both_computing_threads_have_a_workspace() -> None:
    small, large = workspace_bytes(":4096:2:16:8"), workspace_bytes(":4096:8")
    assert small == 2 * (8 << 20) + 2 * (128 << 10) + (8 << 20)
    assert large - small == 2 * ((32 << 20) - (8 << 20) - (128 << 10))


class Runtime:
    """Takes note of what is pinned."""

    def __init__(self, code: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._code = code

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert address % PAGE_BYTES == 0
        assert flags == 1  # for all GPUs
        self.pinned[address] = n_bytes
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def host_empty(n_bytes: int) -> torch.Tensor:
    return CudaDevice.host_empty(CudaDevice.__new__(CudaDevice), n_bytes)


def test_memory_is_pinned_as_long_as_any_view_of_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    buffers = [host_empty(n_bytes) for n_bytes in (1, PAGE_BYTES, 3 * PAGE_BYTES + 5, 0)]
    assert [buffer.numel() for buffer in buffers] == [1, PAGE_BYTES, 3 * PAGE_BYTES + 5, 0]
    assert sorted(runtime.pinned.values()) == [1, PAGE_BYTES, 3 * PAGE_BYTES + 5]
    pages = [
        (address + at) // PAGE_BYTES
        for address, n_bytes in runtime.pinned.items()
        for at in range(0, n_bytes, PAGE_BYTES)
    ]
    assert len(pages) == len(set(pages)), "no page is pinned twice"
    view = buffers[2][7:].view(torch.uint8)[:4]
    buffers.clear()
    gc.collect()
    assert list(runtime.pinned.values()) == [3 * PAGE_BYTES + 5]
    view.fill_(3)
    del view
    gc.collect()
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.cudart", lambda: Runtime(2))
    with pytest.raises(StreamError, match="CUDA error 2; raise the limit of locked memory"):
        host_empty(5)
