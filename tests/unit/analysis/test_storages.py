"""The accounting of storages: exactly what is alive is counted, and the budget is enforced."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import (
    ALIGNED_BYTES,
    StorageTracker,
    is_dense,
    placed,
    placed_bytes,
    span_bytes,
    span_of,
)
from tests.support.waiting import PATIENCE_S

KB = 1000  # bytes of 250 floats


def floats(count: int = 250) -> Tensor:
    return torch.ones(count)


def test_temporaries_count_towards_the_peak_and_are_released() -> None:
    with StorageTracker() as tracker:
        total = (floats() + 1.0).mul(2.0).sum()
        assert tracker.live_bytes == 4
        assert tracker.peak_bytes == 2 * KB, "input and output of each operation"
        del total
    assert tracker.live_bytes == 0


def test_views_count_nothing_and_keep_their_storage_alive() -> None:
    with StorageTracker() as tracker:
        whole = floats()
        part = whole[10:20]
        shaped = whole.view(10, 25).t()
        assert tracker.live_bytes == KB
        del whole, shaped
        assert tracker.live_bytes == KB, "the part keeps all of it"
        assert part.numel() == 10
        del part
        assert tracker.live_bytes == 0


def test_in_place_operations_allocate_nothing() -> None:
    with StorageTracker() as tracker:
        value = floats()
        value.add_(1.0).relu_()
        torch.add(value, 1.0, out=value)
        assert tracker.peak_bytes == KB


def test_what_was_made_outside_is_not_counted_until_adopted() -> None:
    outside = floats()
    with StorageTracker() as tracker:
        outside.add_(1.0)
        outside.view(25, 10)
        assert tracker.live_bytes == 0
        tracker.adopt(outside)
        tracker.adopt(outside[3:])
        assert tracker.live_bytes == KB


def test_saved_tensors_live_until_backward() -> None:
    weight = torch.ones(250, requires_grad=True)
    with StorageTracker() as tracker:
        hidden = weight.exp()  # keeps its output for backward
        loss = hidden.sum()
        del hidden
        assert tracker.live_bytes == KB + 4
        loss.backward()
        del loss
        assert tracker.live_bytes == KB, "only the gradient is left"
        weight.grad = None
        assert tracker.live_bytes == 0


def test_backward_is_counted_too() -> None:
    weight = torch.ones(250, requires_grad=True)
    with StorageTracker() as tracker:
        loss = weight.exp().exp().sum()
        tracker.reset_peak()
        before = tracker.peak_bytes
        loss.backward()
        assert tracker.peak_bytes >= before + KB


def test_operations_with_several_results() -> None:
    with StorageTracker() as tracker:
        values, indices = floats().sort()
        assert tracker.live_bytes == KB + 2 * KB
        parts = values.split(50)
        assert tracker.live_bytes == KB + 2 * KB
        del values, indices
        assert tracker.live_bytes == KB
        del parts
        assert tracker.live_bytes == 0


def test_a_storage_freed_by_another_thread_is_released() -> None:
    with StorageTracker() as tracker:
        held = [floats()]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join(timeout=PATIENCE_S)
        assert tracker.live_bytes == 0


def test_many_threads_that_free_at_once_leave_nothing() -> None:
    with StorageTracker() as tracker:
        shares = [[floats(3) for _ in range(500)] for _ in range(4)]
        threads = [threading.Thread(target=share.clear) for share in shares]
        for thread in threads:
            thread.start()
        own = [floats(5) for _ in range(2000)]
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
        assert tracker.live_bytes == 2000 * 20
        del own
        assert tracker.live_bytes == 0


def test_reused_addresses_are_counted_again() -> None:
    with StorageTracker() as tracker:
        for _ in range(2000):
            assert floats() is not None
        assert tracker.live_bytes == 0
        kept = floats()
        assert tracker.live_bytes == KB
        assert kept.sum() == 250


def test_allocations_of_the_host_are_ignored() -> None:
    with StorageTracker() as tracker:
        with tracker.ignoring():
            host = floats()
        assert tracker.live_bytes == 0
        assert floats() is not None
        assert host.numel() == 250
    assert tracker.peak_bytes == KB


def test_other_threads_are_not_counted() -> None:
    held: list[Tensor] = []
    with StorageTracker() as tracker:
        thread = threading.Thread(target=lambda: held.append(floats()))
        thread.start()
        thread.join(timeout=PATIENCE_S)
        assert len(held) == 1
        assert tracker.peak_bytes == 0


def test_the_check_runs_after_each_growth_and_may_raise() -> None:
    class FullError(Exception):
        pass

    seen: list[tuple[int, int, str]] = []

    def check(live: int, new: int, operation: str) -> None:
        seen.append((live, new, operation))
        if live > 2 * KB:
            raise FullError

    first = floats()
    with StorageTracker(check) as tracker:
        second = first + 1.0
        assert seen == [(KB, KB, "aten.add.Tensor")]
        with pytest.raises(FullError):
            second.repeat(2)
        assert seen[-1][:2] == (3 * KB, 2 * KB)
        assert tracker.live_bytes == KB, "the result that was refused is gone"
        assert second.add(1.0) is not None


def test_nothing_is_kept_alive() -> None:
    with StorageTracker() as tracker:
        value = floats()
        alive = weakref.ref(value.untyped_storage())
        del value
    assert alive() is None
    assert tracker.live_bytes == 0


def test_dense_tensors_fill_their_memory_in_any_order() -> None:
    tensor = torch.empty(2, 3, 4)
    for dense in (tensor, tensor.permute(2, 0, 1), tensor[:1], tensor[None], torch.empty(())):
        assert is_dense(dense)
    for other in (tensor[:, :2], tensor[..., ::2], tensor[:1].expand(2, 3, 4)):
        assert not is_dense(other)


@pytest.mark.parametrize(
    "like",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(24.0).view(2, 3, 4)[:, 1:, 1:3],
        torch.arange(24.0)[3:9],
        torch.arange(4.0).expand(3, 4),
        torch.arange(12).view(3, 4)[:, 1:],
        torch.ones(()),
        torch.ones(2, 0, 3),
    ],
)
def test_a_copy_lies_as_its_source_does(like: torch.Tensor) -> None:
    copied = placed(torch.empty(placed_bytes(like), dtype=torch.uint8), like)
    span_of(copied).copy_(span_of(like))
    assert torch.equal(copied, like)
    assert copied.stride() == like.stride()
    if like.is_floating_point():
        assert copied.data_ptr() % ALIGNED_BYTES == like.data_ptr() % ALIGNED_BYTES
    assert span_bytes(like) <= like.untyped_storage().nbytes()
