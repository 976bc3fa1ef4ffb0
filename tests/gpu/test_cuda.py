"""The swap engine on a real GPU: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import atomtrain
from atomtrain.engine.devices.cuda import CUDA
from atomtrain.engine.devices.gpu_device import GpuDevice, _GpuEvent, _GpuStream
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.streams import Event
from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import AdamW, masters
from atomtrain.planning.plan.disk import PAGE_BYTES
from atomtrain.planning.plan.shape import Activation
from tests.support.injecting import device_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = GPTConfig(
    layers=6, width=256, heads=4, head_width=64, vocabulary=1024, context=128, dropout=0.1
)
BUDGET = "256MiB"
STEPS = 4
CYCLES = 5_000_000
"""Of the GPU's clock: some milliseconds."""


@pytest.fixture
def _same_bits() -> Iterator[None]:
    """Let the GPU add in the same order each time; its fast attention kernels do not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(before)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def untied_gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.head.weight = nn.Parameter(0.02 * torch.randn(CONFIG.vocabulary, CONFIG.width))
    return model


def batches(micro_batches: int) -> list[list[dict[str, Tensor]]]:
    torch.manual_seed(1)

    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(CONFIG.vocabulary, (4, CONFIG.context + 1))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return [[batch() for _ in range(micro_batches)] for _ in range(STEPS)]


def train(
    model: GPT,
    segments: int,
    inject: Callable[[str], None] | None = None,
    micro_batches: int = 3,
    activations: Activation | None = None,
    clip_norm: float | None = 1.0,
    slots: int | None = None,
) -> tuple[list[float], dict[str, Tensor], atomtrain.Engine]:
    steps = batches(micro_batches)
    options = atomtrain.Options(
        micro_batches=micro_batches,
        segments=segments,
        clip_norm=clip_norm,
        activations=activations,
        slots=slots,
        # Host and device round differently, and the planner would keep so small a model there.
        host_layers=0,
        optimizer_on_device=False,
    )
    torch.manual_seed(2)
    with atomtrain.swap(
        model, steps[0][0], optimizer=adamw, device=device_with(inject, "cuda", BUDGET),
        device_memory=BUDGET, options=options,
    ) as engine:  # fmt: skip
        losses = [engine.step(step) for step in steps]
        state = {name: value.clone() for name, value in engine.state_dict().items()}
    return losses, state, engine


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def late_jobs(seed: int) -> Callable[[str], None]:
    """Hold up the thread that hands a job to the GPU."""
    source = random.Random(seed)
    return lambda _: time.sleep(source.random() * 5e-3)


def late_copies(seed: int) -> Callable[[str], None]:
    """Hold up the GPU's own stream: jobs are handed over in time, and begin later."""
    source = random.Random(seed)
    return lambda _: torch.cuda._sleep(int(source.random() * CYCLES))


@pytest.mark.usefixtures("_same_bits")
@pytest.mark.parametrize("segments", [2, 4, 8])
def test_every_partition_gives_the_same_bits(segments: int) -> None:
    """One segment moves nothing during a step, so it is the resident reference."""
    whole, expected, _ = train(untied_gpt(), 1)
    losses, state, _ = train(untied_gpt(), segments)
    assert losses == whole
    assert_equal(state, expected)


@pytest.mark.usefixtures("_same_bits")
@pytest.mark.parametrize("delays", [late_jobs, late_copies])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_random_delays_change_nothing(
    delays: Callable[[int], Callable[[str], None]], clip_norm: float | None
) -> None:
    """Without clipping the next step's first segments come while this one ends."""
    expected = train(untied_gpt(), 8, clip_norm=clip_norm, slots=3)[1]
    delayed = train(untied_gpt(), 8, delays(0), clip_norm=clip_norm, slots=3)[1]
    assert_equal(delayed, expected)


class _Unordered(_GpuEvent):
    """Orders nothing on the GPU."""

    def order(self, stream: torch.cuda.Stream) -> None:
        Event.wait(self)


@pytest.mark.usefixtures("_same_bits")
def test_without_the_events_of_loads_delays_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice: it is the events that compute waits for."""
    expected = train(untied_gpt(), 8)[0]
    made = _GpuStream._new_event

    def new_event(stream: _GpuStream) -> Event:
        return _Unordered(CUDA) if stream.name == "load" else made(stream)

    def late_loads(stream: str) -> None:
        if stream == "load":
            torch.cuda._sleep(20 * CYCLES)

    monkeypatch.setattr(_GpuStream, "_new_event", new_event)
    # Whatever comes of it, parameters are only numbers; other values come by other streams.
    assert train(untied_gpt(), 8, late_loads)[0] != expected


@pytest.mark.usefixtures("_same_bits")
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_what_forward_saves_waits_and_changes_nothing(activations: Activation) -> None:
    expected = train(untied_gpt(), 8, activations="recompute")[1]
    for delays in (None, late_jobs(1), late_copies(1)):
        _, state, engine = train(untied_gpt(), 8, delays, activations=activations)
        assert set(engine.plan.activations[1:-1]) == {activations}
        assert_equal(state, expected)


def test_close_to_an_ordinary_loop_on_the_gpu() -> None:
    model = untied_gpt()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reference = copy.deepcopy(model).cuda()
    optimizer = adamw(list(reference.parameters()))
    losses = train(model, 4)[0]
    for step, loss in zip(batches(3), losses, strict=True):
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            out = reference(**{name: value.cuda() for name, value in batch.items()}).loss
            (out / len(step)).backward()
            total += float(out.detach()) / len(step)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        assert loss == pytest.approx(total, rel=2e-3)


def test_the_budget_is_honoured_and_depth_is_free() -> None:
    peaks = []
    for layers in (8, 32):
        config = GPTConfig(
            layers=layers, width=512, heads=8, head_width=64, vocabulary=1024, context=128
        )
        tokens = torch.randint(1024, (4, 128))
        batch = {"input_ids": tokens, "labels": tokens}
        with atomtrain.swap(
            GPT(config),
            batch,
            optimizer=adamw,
            device="cuda",
            device_memory="208MiB",
            options=atomtrain.Options(  # the planner would use what a shallow model leaves
                micro_batches=2,
                segments=layers + 2,
                slots=2,
                gradient_buffers=2,
                host_layers=0,
                activations="recompute",
                optimizer_on_device=False,
            ),
        ) as engine:
            for _ in range(3):
                engine.step([batch, batch])
            assert engine.last is not None
            peaks.append(engine.last.device_peak_bytes)
            assert peaks[-1] <= engine.device.memory_bytes
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_pinned_host_memory_has_the_exact_size_up_to_pages() -> None:
    device = GpuDevice(CUDA, 0, 64 << 20)
    try:
        n_bytes = (33 << 20) + 256
        buffer = device.host_empty(n_bytes)
        assert buffer.numel() == n_bytes
        assert buffer.untyped_storage().nbytes() <= n_bytes + 2 * PAGE_BYTES
        assert buffer.is_pinned()
    finally:
        device.close()


def test_small_pinned_buffers_and_long_copies() -> None:
    device = GpuDevice(CUDA, 0, 1 << 30)
    pool = HostPool(device)
    buffers = [pool.take(n) for n in (1, 4096, 100, 5 << 20, 4097, 0, 70 << 20, 3)]
    assert all(buffer.is_pinned() for buffer in buffers if buffer.numel())
    with device.computing():
        for buffer in buffers:
            buffer.random_()
            there = device.empty((buffer.numel(),), torch.uint8)
            device.hold(device.load.submit(lambda a=there, b=buffer: device.copy_in(a, b)))
            device.synchronize()
            assert torch.equal(there.cpu(), buffer)
    device.close()


def test_a_closed_engine_leaves_the_gpu_as_it_was() -> None:
    before = torch.cuda.get_per_process_memory_fraction(0)
    torch.cuda.empty_cache()
    allocated_bytes = torch.cuda.memory_allocated(0)
    engine = train(untied_gpt(), 4)[2]
    assert engine.last is not None
    assert engine.last.device_peak_bytes > 0
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    # cuBLAS keeps its workspaces.
    reserved_bytes = engine.device.reserved_bytes
    assert torch.cuda.memory_allocated(0) <= allocated_bytes + reserved_bytes


def test_split_masters_join_on_the_gpu_bit_for_bit() -> None:
    """Joining takes the conversion of bfloat16 to float32 for a shift, NaN included."""
    streams = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda")
    rests = streams.flip(0).to(torch.int16)
    values, spare = (torch.empty(streams.shape, device="cuda") for _ in range(2))
    masters.join(streams.to(torch.int16).view(torch.bfloat16), rests, values, spare)
    assert torch.equal(values.view(torch.int32), (streams << 16) + rests)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_deterministic_steps_have_the_same_bits_in_each_run(precision: str | None) -> None:
    """With the fast attention kernels that PyTorch then chooses, and the loss in pieces."""

    def bits() -> dict[str, Tensor]:
        steps = batches(3)
        torch.manual_seed(2)
        options = atomtrain.Options(
            micro_batches=3,
            deterministic=True,
            head_pieces=2,
            precision=precision,  # type: ignore[arg-type]
        )
        with atomtrain.swap(
            untied_gpt(), steps[0][0], optimizer=lambda p: AdamW(p, lr=1e-3), device="cuda",
            device_memory=BUDGET, options=options,
        ) as engine:  # fmt: skip
            for step in steps:
                engine.step(step)
            return {name: value.clone() for name, value in engine.state_dict().items()}

    assert_equal(bits(), bits())
    assert not torch.are_deterministic_algorithms_enabled()
