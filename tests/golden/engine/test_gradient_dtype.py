"""Gradients that add up in float32: the bits of an ordinary loop whose gradients do so too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.devices.streams import Inject
from atomtrain.errors import ConfigError
from atomtrain.planning import Shape
from tests.golden.engine.test_precision import (
    assert_equal,
    factory_of,
    gpt,
    narrowed,
    token_batches,
)
from tests.support.injecting import device_with
from tests.support.planning_models import use_shape
from tests.support.reference import train, twin
from tests.support.swapped import random_delays

STEPS = 3

pytestmark = pytest.mark.skipif(
    not hasattr(torch.empty(0), "grad_dtype"), reason="torch is older than 2.10"
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


def wide(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def swap(
    model: nn.Module,
    example: Any,
    device: str = "emulated",
    inject: Inject | None = None,
    **options: Any,
) -> Any:
    factory = factory_of("16")
    return atomtrain.swap(
        model,
        example,
        optimizer=lambda _: factory(model),
        device=device_with(inject, device, "64MiB"),
        device_memory="64MiB",
        options=atomtrain.Options(
            precision="bf16", gradient_dtype="float32", profile=False, **options
        ),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"segments": 1, "optimizer_on_device": False},
        {"segments": 5, "optimizer_on_device": False, "inject": random_delays(3)},
        {"segments": 3, "optimizer_on_device": False, "clip_norm": 0.5},
        {"optimizer_on_device": True, "clip_norm": 0.5},
        {"device": "cpu", "segments": 5},
    ],
)
def test_gradients_in_float32(options: dict[str, Any]) -> None:
    model, steps = gpt(tied=False, dropout=0.1), token_batches(4, STEPS)
    reference, resident = narrowed(model, factory_of("16"))
    torch.manual_seed(3)
    expected = train(wide(reference), steps, resident, clip_norm=options.get("clip_norm"))
    assert next(reference.parameters()).grad.dtype is torch.float32
    with swap(model, steps[0][0], micro_batches=4, **options) as engine:
        torch.manual_seed(3)
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


def test_gradients_in_float32_of_layers_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = gpt(tied=False), token_batches(3, STEPS)
    reference, resident = narrowed(model, factory_of("16"))
    expected = train(wide(reference), steps, resident)
    use_shape(monkeypatch, Shape((1, 3), (1, 3, 5), 2, 1, "device", (), 1))
    with swap(model, steps[0][0], micro_batches=3) as engine:
        assert engine.plan.host_layers == 1
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)


@pytest.mark.parametrize("segments", [2, 5])
def test_a_shared_weights_gradient_in_float32(segments: int) -> None:
    model, steps = gpt(), token_batches(1, STEPS)
    reference, resident = narrowed(model, factory_of("16"))
    expected = train(wide(reference), steps, resident)
    with swap(model, steps[0][0], segments=segments, optimizer_on_device=False) as engine:
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal(engine, reference, resident)


def test_it_is_another_sum_than_that_of_16_bits() -> None:
    model, steps = gpt(tied=False), token_batches(4, 1)
    norms = []
    for dtype in (None, "float32"):
        factory = factory_of("16")
        mine = twin(model)
        with atomtrain.swap(
            mine,
            steps[0][0],
            optimizer=lambda _, mine=mine, factory=factory: factory(mine),
            device="emulated",
            options=atomtrain.Options(
                precision="bf16",
                gradient_dtype=dtype,
                profile=False,
                micro_batches=4,
                clip_norm=9.0,
            ),
        ) as engine:
            engine.step(steps[0])
            norms.append(engine.gradient_norm)
    assert norms[0] != norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_what_is_float32_already_stays_as_it_is() -> None:
    model, steps = gpt(tied=False), token_batches(1)
    with atomtrain.swap(
        model,
        steps[0][0],
        optimizer=torch.optim.AdamW,
        device="emulated",
        options=atomtrain.Options(gradient_dtype="float32", profile=False),
    ) as engine:
        assert engine.plan.gradient_bytes == engine.plan.slot_bytes
    with pytest.raises(ConfigError, match="gradient_dtype must be 'float32'"):
        atomtrain.Options(gradient_dtype="float16")
    with pytest.raises(ConfigError, match="all of 16 or all of 32 bits"):
        atomtrain.swap(
            gpt(tied=False).double(),
            steps[0][0],
            optimizer=torch.optim.AdamW,
            device="emulated",
            options=atomtrain.Options(gradient_dtype="float32", profile=False),
        )
