"""Several devices: the same bits as resident training that adds gradients in the stated order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.engine.devices.streams import Inject
from atomtrain.engine.execution.multi_device import divided
from atomtrain.errors import ConfigError, PlanError
from atomtrain.optimizers import AdamW
from atomtrain.planning.plan.disk import on_disk_up_to
from atomtrain.planning.plan.updating import share_of
from tests.support import vision_models
from tests.support.any_models import Case
from tests.support.injecting import device_with
from tests.support.reference import assert_equal_training, gpt_loss, twin
from tests.support.several import in_shares, train_in_shares
from tests.support.swapped import (
    Partial,
    adamw,
    gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")
TWO = "emulated:1GiB/s,emulated:1GiB/s"


def swap(
    model: nn.Module,
    example: Any,
    optimizer: Any = adamw,
    loss: Any = None,
    devices: int = 2,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        example,
        optimizer=optimizer,
        device=device_with(inject, ["emulated:1GiB/s"] * devices, "64MiB"),
        device_memory="64MiB",
        loss=loss,
        options=atomtrain.Options(**options),
    )


def check(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    devices: int = 2,
    optimizer: Any = adamw,
    loss_of: Any = gpt_loss,
    loss: Any = None,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> atomtrain.Engine:
    reference = twin(model)
    resident = optimizer(reference.parameters())
    state = torch.get_rng_state()
    clip_norm = options.get("clip_norm")
    expected = train_in_shares(reference, steps, resident, devices, loss_of, clip_norm, weights)
    left_at = torch.get_rng_state()
    torch.set_rng_state(state)
    options.setdefault("micro_batches", len(steps[0]))
    with swap(model, steps[0][0], optimizer, loss, devices, **options) as engine:
        assert [engine.step(micro_batches, weights) for micro_batches in steps] == expected
        assert_equal_training(engine, reference, resident)
        assert torch.equal(torch.get_rng_state(), left_at)
        assert len(engine.devices) == devices
        for device in engine.devices:
            assert device.peak_bytes() <= engine.plan.device_peak_bytes
        # A step may have run on fewer devices than there are.
        busy = engine.devices[: min(devices, len(steps[-1]))]
        assert all(device.peak_bytes() > 0 for device in busy)
    return engine


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_two_devices(segments: int, micro_batches: int) -> None:
    steps = token_batches(micro_batches)
    engine = check(gpt(0.3, tied=False), steps, segments=segments, inject=random_delays(segments))
    assert engine.plan.micro_batches == share_of(micro_batches, 2)


@pytest.mark.parametrize("weights", [[7, 40, 22, 3, 9], [7, 40, 0, 3, 0]])
def test_micro_batches_that_count_unlike(weights: list[float]) -> None:
    check(gpt(0.3, tied=False), token_batches(5), segments=3, clip_norm=0.5, weights=weights)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("segments", [1, 4])
def test_tied_weights(devices: int, segments: int) -> None:
    steps = token_batches(devices)
    check(gpt(0.2), steps, devices, segments=segments, inject=random_delays(devices))


@pytest.mark.parametrize("make", [vision_models.qwen3_vl, vision_models.idefics3])
def test_models_that_run_by_their_own_code_before_their_language_model(
    make: Callable[[], Case],
) -> None:
    model, draw = make()
    steps = [[draw() for _ in range(4)] for _ in range(3)]
    check(model, steps, loss_of=lambda model, batch: model(**batch).loss, segments=3)


@pytest.mark.parametrize("clip_norm", [0.1, 1e6])
def test_clipping_is_of_the_sum(clip_norm: float) -> None:
    check(gpt(0.1, tied=False), token_batches(3), segments=3, clip_norm=clip_norm)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_devices_without_a_micro_batch_do_nothing(micro_batches: int) -> None:
    check(gpt(0.3, tied=False), token_batches(micro_batches), devices=3, segments=2)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_graphs_that_wait(activations: Any) -> None:
    check(gpt(0.3, tied=False), token_batches(3), activations=activations, segments=4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_on_the_host(tied: bool) -> None:
    steps = token_batches(2)
    engine = check(gpt(0.0, tied), steps, host_layers=1, inject=random_delays(1), clip_norm=0.5)
    assert engine.plan.host_layers == 1


@pytest.mark.parametrize("segments", [1, 4])
def test_a_parameter_that_only_some_devices_reach(segments: int) -> None:
    """With an even number of rows one parameter has no gradient."""
    model = nn.Sequential(nn.Linear(7, 7), Partial(7), nn.Tanh(), nn.Linear(7, 3))
    steps = [pairs(rows, 7) for rows in ([9, 8], [8, 9], [8, 8], [9, 9])]
    check(model, steps, 2, adamw, sequential_loss, regression, segments=segments)


class Branching(nn.Module):
    """Taken apart by export; one module is used by all layers, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.3)

    def forward(self, value: Tensor) -> Tensor:
        hidden = value
        for block in self.blocks:
            hidden = self.dropout(torch.tanh(block(hidden))) + value
        return hidden


def squares(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def test_an_exported_model_and_its_evaluation() -> None:
    model, steps = Branching(), [[torch.randn(5, 8) for _ in range(4)] for _ in range(3)]

    def loss_of(model: nn.Module, value: Tensor) -> Tensor:
        return squares(model(value))

    with swap(twin(model), steps[0][0], loss=squares, micro_batches=4, segments=3) as engine:
        judged = twin(model).eval()
        with torch.no_grad():
            expected = [float(loss_of(judged, value)) for value in steps[1][:3]]
        assert engine.evaluate(steps[1][:3]) == sum(expected) / 3
        engine.step(steps[0])
    check(model, steps, 2, adamw, loss_of, squares, segments=3)


def test_a_changed_dropout_reaches_all_devices() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 3))
    steps = [pairs([4, 4], 6) for _ in range(2)]
    reference = twin(model)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    expected = train_in_shares(reference, steps[:1], resident, 2, sequential_loss)
    reference[1].p = 0.1
    expected += train_in_shares(reference, steps[1:], resident, 2, sequential_loss)
    torch.set_rng_state(state)
    with swap(model, steps[0][0], loss=regression, micro_batches=2, segments=3) as engine:
        losses = [engine.step(steps[0])]
        model[1].p = 0.1
        losses.append(engine.step(steps[1]))
        assert losses == expected


def test_more_micro_batches_than_planned() -> None:
    steps = [*token_batches(2, steps=1), *token_batches(5, steps=1), *token_batches(3, steps=1)]
    engine = check(gpt(0.1, tied=False), steps, segments=3)
    assert engine.plan.micro_batches == 3


@pytest.mark.parametrize("on_disk", ["moments", "parameters"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_on_disk(on_disk: Any, clip_norm: float | None, tmp_path: Path) -> None:
    engine = check(
        gpt(0.1, tied=False), token_batches(3), disk=tmp_path, on_disk=on_disk, segments=3,
        profile=False, clip_norm=clip_norm, inject=random_delays(3),
    )  # fmt: skip
    assert engine.plan.on_disk == on_disk_up_to(on_disk)


class Centred(nn.Module):
    """Takes away a running mean, which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(value.detach().mean(0), 0.25)
        return value - self.mean


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("devices", [2, 3])
def test_buffers_follow_the_first_device(devices: int, activations: Any) -> None:
    """What the others compute in a step depends on what they took over at its beginning."""
    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    steps = [pairs([5] * count, 6) for count in (4, 3, 2, 4)]
    check(
        model, steps, devices, adamw, sequential_loss, regression, micro_batches=4, segments=4,
        activations=activations, host_layers=0, inject=random_delays(devices),
    )  # fmt: skip


def test_an_evaluation_sees_the_buffers_of_the_first_device_everywhere() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Linear(6, 3))
    step = pairs([5] * 4, 6)
    with swap(model, step[0], loss=regression, micro_batches=4, segments=3) as engine:
        engine.step(step)
        judged = twin(model)
        engine.synchronize()
        judged.load_state_dict(model.state_dict())
        judged.eval()
        with torch.no_grad():
            expected = [float(regression(judged(value), (value, of))) for value, of in step]
        assert engine.evaluate(step) == sum(expected) / 4


_WIDE = pytest.param(
    "float32",
    marks=pytest.mark.skipif(
        not hasattr(torch.empty(0), "grad_dtype"), reason="torch is older than 2.10"
    ),
)


@pytest.mark.parametrize("gradient_dtype", [None, _WIDE])
def test_bfloat16_with_masters(gradient_dtype: Any) -> None:
    """Two devices with a micro-batch each, and one device twice: the sums are the same."""
    losses = []
    for devices in (1, 2):
        torch.manual_seed(7)
        model, steps = gpt(0.2, tied=False), token_batches(2)
        with swap(
            model, steps[0][0], lambda ps: AdamW(ps, lr=1e-2), devices=devices,
            precision="bf16", gradient_dtype=gradient_dtype, micro_batches=2, segments=3,
            optimizer_on_device=False,
        ) as engine:  # fmt: skip
            losses.append([engine.step(step) for step in steps])
            weights = engine.state_dict()["head.weight"].clone()
        losses[-1].append(float(weights.sum()))
    assert losses[0] == losses[1]


def test_what_the_host_holds_is_planned() -> None:
    example = token_batches(1)[0][0]
    with swap(gpt(), example, devices=1, optimizer_on_device=False) as engine:
        alone = engine.state_bytes
    with swap(gpt(), example, devices=3) as engine:
        gradients_bytes = engine._core.store.gradients.nbytes
        assert engine.state_bytes == alone + 2 * gradients_bytes
        assert engine.plan.host_bytes > engine.state_bytes
        regions = engine.memory_map()
        shown = sum(region.bytes for region in regions if region.place == "host")
        assert shown == pytest.approx(engine.plan.host_bytes, abs=100)  # parts are rounded
        further = [r for r in regions if r.label.startswith("of device")]
        assert [r.bytes for r in further] == [gradients_bytes] * 2
        assert engine.plan.device_blocks == ()
        # The parameters are there once.
        stores = [member.store for member in engine._core.members]
        assert {store.parameters.data_ptr() for store in stores} == {
            stores[0].parameters.data_ptr()
        }
        host_bytes = engine.plan.host_bytes
    with pytest.raises(PlanError, match="host memory"):
        swap(gpt(), example, devices=3, host_memory=host_bytes - 2 * gradients_bytes)


def test_what_several_devices_cannot_share_is_refused() -> None:
    example = token_batches(1)[0][0]
    with pytest.raises(ConfigError, match="optimizer_on_device"):
        swap(gpt(), example, optimizer_on_device=True)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cpu,cpu", "cannot share"),
        ("auto,auto", "cannot share"),
        ("cuda:0,emulated", "cannot share"),
        ("cuda:0,cuda", "twice"),
        ("emulated,", "no device ''"),
        ([], "at least one"),
    ],
)
def test_devices_that_cannot_be(device: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        atomtrain.swap(gpt(), token_batches(1)[0][0], optimizer=adamw, device=device)


def test_names_with_commas_are_devices_too() -> None:
    steps = token_batches(2)
    with atomtrain.swap(
        gpt(), steps[0][0], optimizer=adamw, device=TWO, device_memory="64MiB"
    ) as engine:
        assert engine.device_name == "2 x emulated"
        seen = []
        engine.on_segment = seen.append
        engine.step(steps[0])
        assert [done.phase for done in seen].count("turn") == 1
        assert engine.last is not None
        peaks = [device.peak_bytes() for device in engine.devices]
        assert engine.last.device_peak_bytes == max(peaks)


@pytest.mark.parametrize(("count", "devices"), [(5, 2), (2, 3), (7, 3), (0, 2), (4, 4)])
def test_shares_are_runs_of_nearly_the_same_length(count: int, devices: int) -> None:
    items = list(range(count))
    shares = divided(items, devices)
    assert [list(share) for share in shares] == [list(run) for run in in_shares(count, devices)]
    assert [item for share in shares for item in share] == items
