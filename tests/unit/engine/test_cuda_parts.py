"""What of CUDA can be checked without a GPU: caps, workspaces, pinned memory."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from atomtrain.engine.devices import gpu_device, pinning
from atomtrain.engine.devices.cuda import CUDA, use_expandable_segments, workspace_bytes
from atomtrain.engine.devices.gpu_device import GpuDevice
from atomtrain.engine.devices.gpus import Caps, library_bytes, split_of
from atomtrain.planning.plan.disk import PAGE_BYTES
from atomtrain.training.tools import doctor

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
    caps = Caps(torch.cuda)
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
    caps = Caps(torch.cuda)
    caps.add(1, 900)
    assert fractions[1] == pytest.approx(0.9)
    caps.add(1, 900)
    assert fractions[1] == 1.0, "all there is"
    caps.remove(1, 900)
    caps.remove(1, 900)
    assert fractions == {0: 1.0, 1: 0.5}


def test_on_rocm_a_workspace_under_amds_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks for cuBLAS's name first, so that must not be set then."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert library_bytes("cuda:0,cuda:1") == workspace_bytes(":16:8")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr("torch.version.hip", None)
    assert library_bytes("cuda:0,cuda:1") == workspace_bytes(os.environ["CUBLAS_WORKSPACE_CONFIG"])


def test_threads_sleep_while_they_wait_and_times_are_only_taken_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.Event", lambda **given: given)
    assert CUDA.event() == {"blocking": True}
    assert CUDA.event(timed=True) == {"enable_timing": True}


def test_both_computing_threads_have_a_workspace() -> None:
    small, large = workspace_bytes(":4096:2:16:8"), workspace_bytes(":4096:8")
    assert small == 2 * (8 << 20) + 2 * (128 << 10) + (8 << 20)
    assert large - small == 2 * ((32 << 20) - (8 << 20) - (128 << 10))


class Runtime:
    """Takes note of what is pinned, of which the system allows only so much."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self._most_bytes = most_bytes
        self.errors_cleared = 0

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802
        assert address % PAGE_BYTES == 0
        assert flags == 1  # for all GPUs
        if self._most_bytes is not None and n_bytes + sum(self.pinned.values()) > self._most_bytes:
            return 2
        self.pinned[address] = n_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def install(self, patch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
        def sleep(cycles: int) -> None:
            self.errors_cleared += 1
            raise RuntimeError("CUDA error: out of memory")

        patch.setattr("torch.cuda.cudart", lambda: self)
        patch.setattr("torch.cuda.init", lambda: None)
        patch.setattr("torch.cuda._sleep", sleep)
        patch.setattr(pinning, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(pinning, "PINS", pinning.Pins())
        patch.setattr(gpu_device, "PINS", pinning.PINS)


def host_empty(n_bytes: int) -> torch.Tensor:
    device = GpuDevice.__new__(GpuDevice)
    device.vendor = CUDA
    return device.host_empty(n_bytes)


def test_memory_is_pinned_as_long_as_any_view_of_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    runtime.install(monkeypatch, 1 << 20)
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


def test_what_cannot_be_pinned_stays_ordinary_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(most_bytes=5 * PAGE_BYTES)
    runtime.install(monkeypatch, 2 * PAGE_BYTES)
    buffer = host_empty(9 * PAGE_BYTES)
    assert runtime.errors_cleared == 1, "or the next launch would fail"
    # Of the two chunks that there was room for one is given up again, for rings.
    assert list(runtime.pinned.values()) == [2 * PAGE_BYTES]
    parts = [(0, 2 * PAGE_BYTES, False), (2 * PAGE_BYTES, 9 * PAGE_BYTES, True)]
    assert pinning.PINS.parts(buffer) == parts
    assert pinning.PINS.parts(buffer[8:4096]) == [(0, 4088, False)]
    middle = buffer[8192 - 8 : 8192 + 8].view(torch.int32)
    assert pinning.PINS.parts(middle) == [(0, 8, False), (8, 16, True)]
    assert pinning.PINS.parts(torch.ones(3)) == [(0, 12, False)], "was not to be pinned"
    [told] = caplog.messages
    assert told.startswith("only 8.0 KiB of 36.0 KiB of host memory could be pinned (CUDA error 2)")
    small = host_empty(PAGE_BYTES)
    assert pinning.PINS.parts(small) == [(0, PAGE_BYTES, False)]
    more = host_empty(9 * PAGE_BYTES)
    assert len(caplog.messages) == 1
    del buffer, small, more, middle
    gc.collect()
    assert runtime.pinned == {}
    assert pinning.PINS._starts == []


def test_large_memory_is_pinned_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    runtime.install(monkeypatch, 2 * PAGE_BYTES)
    buffer = host_empty(5 * PAGE_BYTES - 3)
    assert [part.stop_bytes - part.start_bytes for part in pinning.PINS.parts(buffer)] == [
        2 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES - 3,
    ]  # fmt: skip
    assert not any(part.staged for part in pinning.PINS.parts(buffer))


@pytest.mark.parametrize("most_bytes", [None, 5 * PAGE_BYTES, 0])
def test_what_can_be_pinned_is_found_and_given_back(
    most_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(most_bytes)
    runtime.install(monkeypatch, PAGE_BYTES)
    found = pinning.pinnable_bytes(CUDA, 16 * PAGE_BYTES)
    assert found == (16 * PAGE_BYTES if most_bytes is None else most_bytes)
    assert runtime.pinned == {}


GIB = 1 << 30


def test_plans_leave_room_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    libraries = workspace_bytes(":4096:8")
    large = split_of(20 * GIB, 24 * GIB, libraries)
    assert large == (libraries + int(0.03 * 20 * GIB), 20 * GIB)
    assert split_of(6 * GIB, 8 * GIB, libraries) == (libraries + (256 << 20), 6 * GIB)
    # Trials have budgets smaller than that: what is spare is beside them.
    assert split_of(112 << 20, 8 * GIB, libraries) == (libraries, (112 + 256) << 20)
    assert split_of(GIB, GIB, libraries).cap_bytes == GIB, "there is no more"


def test_segments_that_grow_unless_the_user_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    name = "_accelerator_setAllocatorSettings"  # older torch lacks it
    monkeypatch.setattr(torch._C, name, told.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert use_expandable_segments()
    assert told == ["expandable_segments:True"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64")
            assert not use_expandable_segments()
    assert len(told) == 1


@pytest.mark.parametrize(("share", "state"), [(1, "ok"), (4, "warning")])
def test_the_doctor_pins_what_can_be(
    share: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.engine.devices.gpus.vendor_here", lambda: CUDA)
    monkeypatch.setattr(pinning, "pinnable_bytes", lambda _, most_bytes: most_bytes // share)
    [finding] = doctor._pinned(6 * GIB)
    assert finding.check == "pinned memory"
    assert finding.state == state
    assert finding.detail.startswith(
        f"{3 / share:.1f} GiB" if share == 1 else "768.0 MiB of memory"
    )
    assert bool(finding.fix) == (state == "warning")
