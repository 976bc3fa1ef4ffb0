"""The GPU in software keeps CUDA's rules, and shows who breaks them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.engine.devices.host_memory import aligned_empty
from tests.support.software_gpu import NotEmulatedError, SoftwareGpus, installed
from tests.support.software_gpu.runtime import functions
from tests.support.software_gpu.streams import DeviceContext, Event, Stream, StreamContext

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="a real torch.cuda is not to be replaced"
)
GPU = torch.device("cuda", 0)


@pytest.fixture(params=range(3))
def gpus(request: pytest.FixtureRequest) -> Iterator[SoftwareGpus]:
    """Two GPUs, with several orders of what has no order."""
    with installed(count=2, seed=request.param) as made:
        yield made


def pinned(values: Tensor) -> Tensor:
    """Return a pinned copy, which is unpinned by nobody."""
    memory = aligned_empty(values.nbytes)[: values.nbytes]
    assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)) == 0
    return memory.view(values.dtype).view(values.shape).copy_(values)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [
        (name, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    ]


def test_functions_take_what_the_real_ones_take() -> None:
    for name, function in functions(SoftwareGpus(1, 0, 0)).items():
        real = getattr(torch.cuda, name)
        assert parameters(function) == parameters(real), name
    for mine, real in ((Stream, torch.cuda.Stream), (Event, torch.cuda.Event)):
        assert parameters(mine.__init__) == parameters(real.__new__)
        for name, method in vars(mine).items():
            if not name.startswith("_") and inspect.isfunction(method):
                assert parameters(method) == parameters(getattr(real, name)), name
    for mine, real in (
        (DeviceContext, torch.cuda.device),
        (StreamContext, torch.cuda.StreamContext),
    ):
        assert parameters(mine) == parameters(real)


def test_tensors_say_they_are_on_a_gpu_and_compute(gpus: SoftwareGpus) -> None:
    numbers = torch.arange(6.0)
    there = numbers.cuda()
    assert there.device == GPU
    assert there.is_cuda
    assert isinstance(there, Tensor)
    rows = there.view(2, 3)
    rows.mul_(2.0)
    assert rows.untyped_storage()._cdata == there.untyped_storage()._cdata
    assert rows.untyped_storage().device == GPU
    assert there.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert torch.equal((rows @ rows.T).cpu(), (2 * numbers).view(2, 3) @ (2 * numbers).view(2, 3).T)
    assert torch.ones(3, device="cuda:1").device.index == 1
    assert float(torch.tensor(2.5, device=GPU)) == 2.5
    assert torch.arange(4, device=GPU).tolist() == [0, 1, 2, 3]
    view = torch.empty(0, device=GPU).set_(there.untyped_storage(), 1, (2,), (2,))
    assert view.tolist() == [2.0, 6.0]
    with pytest.raises(RuntimeError, match="same device"):
        there + numbers


def test_autograd_runs_on_a_thread_of_its_own_with_the_stream_of_forward(
    gpus: SoftwareGpus,
) -> None:
    threads, streams = set(), set()

    def look(_: Tensor) -> None:
        threads.add(threading.current_thread().name)
        streams.add(torch.cuda.current_stream())

    weight = torch.tensor([1.0, 2.0])
    there = weight.cuda().requires_grad_()
    here = weight.clone().requires_grad_()
    there.register_post_accumulate_grad_hook(look)
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there.exp().sum().backward()
        assert there.grad is not None
        found = there.grad.cpu()
    here.exp().sum().backward()
    assert here.grad is not None
    assert torch.equal(found, here.grad)
    assert threads == {"autograd of GPUs"}
    assert streams == {stream}


def test_a_missing_event_is_seen_in_numbers_and_reported() -> None:
    wrong = 0
    for seed in range(10):
        with installed(seed=seed) as gpus:
            other = torch.cuda.Stream(GPU)
            source = pinned(torch.ones(8))
            target = torch.empty(8, device=GPU)
            with torch.cuda.stream(other):
                torch.cuda._sleep(1_000_000)
                target.copy_(source, non_blocking=True)
            wrong += not torch.equal(target.cpu(), source)
            assert "a copy to the device on stream" in gpus.reports[0] or "a read" in str(
                gpus.reports
            )
    assert wrong >= 2, "some order shows it"


def test_events_order_streams(gpus: SoftwareGpus) -> None:
    other, event = torch.cuda.Stream(GPU), torch.cuda.Event()
    assert event.query(), "before it is recorded it is done"
    torch.cuda.current_stream().wait_event(event)
    source = pinned(torch.ones(8))
    target = torch.empty(8, device=GPU)
    with torch.cuda.stream(other):
        torch.cuda._sleep(5_000_000)
        target.copy_(source, non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert torch.equal(target.cpu(), source)
    assert event.query()
    assert gpus.reports == []


def test_a_wait_is_for_the_last_record_before_it(gpus: SoftwareGpus) -> None:
    other, event = torch.cuda.Stream(GPU), torch.cuda.Event()
    target, source = torch.empty(8, device=GPU), pinned(torch.ones(8))
    event.record(other)
    torch.cuda.current_stream().wait_event(event)
    with torch.cuda.stream(other):
        target.copy_(source, non_blocking=True)
    event.record(other)
    target.cpu()
    assert gpus.reports, "the second record came after the wait"


def test_copies_of_pinned_memory_read_it_when_they_run() -> None:
    seen = set()
    for seed in range(10):
        with installed(seed=seed):
            source, ordinary = pinned(torch.zeros(1)), torch.zeros(1)
            targets = torch.empty(2, device=GPU)
            targets[:1].copy_(source, non_blocking=True)
            targets[1:].copy_(ordinary, non_blocking=True)
            source.fill_(1.0)
            ordinary.fill_(1.0)
            late, early = targets.tolist()
            assert early == 0.0
            seen.add(late)
    # The ordinary copy waits for the one before it.
    assert seen == {0.0}
    for seed in range(10):
        with installed(seed=seed):
            source = pinned(torch.zeros(1))
            target = torch.empty(1, device=GPU)
            target.copy_(source, non_blocking=True)
            source.fill_(1.0)
            seen.add(target.item())
    assert seen == {0.0, 1.0}


def test_results_come_to_pinned_memory_when_the_copy_runs(gpus: SoftwareGpus) -> None:
    target, ordinary = pinned(torch.zeros(1)), torch.zeros(1)
    there = torch.ones(1, device=GPU)
    torch.cuda._sleep(1 << 40)
    target.copy_(there, non_blocking=True)
    assert target.item() == 0.0
    assert not torch.cuda.current_stream().query()
    gpus.scheduler.wake()
    ordinary.copy_(there, non_blocking=True)
    assert target.item() == ordinary.item() == 1.0


def test_memory_freed_while_another_stream_uses_it_is_reported(gpus: SoftwareGpus) -> None:
    other = torch.cuda.Stream(GPU)
    target = pinned(torch.zeros(8))
    for waits in (True, False):
        there = torch.ones(8, device=GPU)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000)
            target.copy_(there, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(other)
        del there
        torch.cuda.synchronize()
        assert bool(gpus.reports) != waits


def test_unpinning_under_a_copy_is_reported(gpus: SoftwareGpus) -> None:
    source = pinned(torch.ones(8))
    target = torch.empty(8, device=GPU)
    torch.cuda._sleep(1 << 40)
    target.copy_(source, non_blocking=True)
    gpus.scheduler.wake()
    torch.cuda.cudart().cudaHostUnregister(source.data_ptr())
    assert "unpinned with copies under way" in gpus.reports[0]


def test_memory_is_counted_and_capped(gpus: SoftwareGpus) -> None:
    before = torch.cuda.memory_allocated()
    there = torch.empty(1000, device=GPU)
    view = there[10:]
    assert torch.cuda.memory_allocated() - before == 4096
    del there
    assert torch.cuda.memory_allocated() - before == 4096
    del view
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4096
    torch.cuda.set_per_process_memory_fraction(2**20 / torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(2**20 + 1, dtype=torch.uint8, device=GPU)


def test_random_numbers_follow_the_generator_not_the_order_of_work(gpus: SoftwareGpus) -> None:
    torch.manual_seed(3)
    here = torch.default_generator.get_state()
    state = torch.cuda.default_generators[0].get_state()
    first = torch.nn.functional.dropout(torch.ones(64, device=GPU))
    second = torch.rand(64, device=GPU)
    torch.cuda.default_generators[0].set_state(state)
    other = torch.cuda.Stream(GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        again = torch.nn.functional.dropout(torch.ones(64, device=GPU))
        assert torch.equal(first.cpu(), again.cpu())
        assert torch.equal(second.cpu(), torch.rand(64, device=GPU).cpu())
    assert torch.equal(torch.default_generator.get_state(), here)


def test_times_need_events_that_are_timed_recorded_and_done(gpus: SoftwareGpus) -> None:
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(torch.cuda.Event())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    torch.cuda._sleep(1 << 40)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    gpus.scheduler.wake()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_what_is_not_emulated_says_so(gpus: SoftwareGpus) -> None:
    with pytest.raises(NotEmulatedError, match=r"torch.cuda.memory_summary"):
        torch.cuda.memory_summary()
    with pytest.raises(NotEmulatedError, match="depends on numbers"):
        torch.nonzero(torch.ones(3, device=GPU))
    with pytest.raises(NotEmulatedError, match="a copy from cuda:0 to cuda:1"):
        torch.empty(3, device="cuda:1").copy_(torch.ones(3, device=GPU))


def test_an_error_on_the_gpu_shows_at_the_next_wait_and_stays() -> None:
    with installed():
        table = torch.ones(3, 2, device=GPU)
        torch.nn.functional.embedding(torch.empty(1, dtype=torch.int64, device=GPU), table)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CUDA error"):
                torch.cuda.synchronize()
