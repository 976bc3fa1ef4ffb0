"""The host as its own device: the same bits, and nothing is copied or held twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.devices.streams import Inject
from atomtrain.errors import ConfigError
from tests.support.injecting import device_with
from tests.support.reference import assert_equal_training, gpt_loss, train, twin
from tests.support.swapped import (
    LAYERS,
    Skips,
    adamw,
    fused_adamw,
    gpt,
    random_delays,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4321)


def check(
    model: nn.Module,
    steps: Any,
    optimizer: Any = adamw,
    loss_of: Any = gpt_loss,
    inject: Inject | None = None,
    **options: Any,
) -> None:
    reference = twin(model)
    resident = optimizer(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, steps, resident, loss_of, options.get("clip_norm"))
    torch.set_rng_state(state)
    with atomtrain.swap(
        model,
        steps[0][0],
        optimizer=optimizer,
        device=device_with(inject, "cpu"),
        options=atomtrain.Options(micro_batches=len(steps[0]), **options),
    ) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() == 0


@pytest.mark.parametrize("segments", [None, 2, LAYERS])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_on_the_host(segments: int | None, micro_batches: int, dropout: float) -> None:
    check(gpt(dropout, tied=False), token_batches(micro_batches), segments=segments)


@pytest.mark.parametrize("segments", [1, 3])
def test_a_tied_weight_on_the_host(segments: int) -> None:
    check(gpt(), token_batches(1), segments=segments)


@pytest.mark.parametrize("segments", [1, 5])
def test_skips_on_the_host(segments: int) -> None:
    steps = [
        [{"x": torch.randn(4, 6), "side": torch.randn(4, 6)} for _ in range(2)] for _ in range(3)
    ]
    check(Skips(), steps, loss_of=lambda model, batch: model(**batch), segments=segments)


@pytest.mark.parametrize("seed", range(3))
def test_delays_on_the_host_change_nothing(seed: int) -> None:
    check(
        gpt(0.2, tied=False),
        token_batches(2),
        fused_adamw,
        segments=LAYERS,
        clip_norm=0.5 if seed else None,
        inject=random_delays(seed),
    )


def test_statistics_and_evaluation_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output - batch[1]).pow(2).mean()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), batch)

    steps = [[(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(2)] for _ in range(3)]
    reference = twin(model)
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, loss_of)
    with atomtrain.swap(
        model,
        steps[0][0],
        optimizer=adamw,
        loss=loss,
        device="cpu",
        options=atomtrain.Options(micro_batches=2, segments=4),
    ) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)
        reference.eval()
        with torch.no_grad():
            judged = sum(float(loss_of(reference, batch)) for batch in steps[0]) / 2
        assert engine.evaluate(steps[0]) == judged


def test_the_plan_recomputes_next_to_nothing_where_memory_allows() -> None:
    model, steps = gpt(tied=False), token_batches(1)
    with atomtrain.swap(model, steps[0][0], optimizer=adamw, device="cpu") as engine:
        assert len(engine.plan.recomputed) <= 1  # an embedding only looks up
        assert engine.plan.resident_blocks == ()


def test_the_model_lies_in_memory_once() -> None:
    model, steps = gpt(tied=False), token_batches(1)
    with atomtrain.swap(model, steps[0][0], optimizer=adamw, device="cpu") as engine:
        engine.step(steps[0])
        arena = engine._core.store.parameters.untyped_storage().data_ptr()
        leaves = [
            leaf
            for held in engine._core.executor.slots._views._leaves.values()
            for leaf in held.values()
        ]
        assert leaves
        assert {leaf.untyped_storage().data_ptr() for leaf in leaves} == {arena}


def test_layers_apart_make_no_sense_on_the_host() -> None:
    model, steps = gpt(), token_batches(1)
    with pytest.raises(ConfigError, match="leave host_layers out"):
        atomtrain.swap(
            model,
            steps[0][0],
            optimizer=adamw,
            device="cpu",
            options=atomtrain.Options(host_layers=1),
        )


def test_a_link_to_the_host_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no device 'cpu:4GiB/s'"):
        open_device("cpu:4GiB/s")
