"""Float16 with a scaled loss: the bits of an ordinary loop; steps that overflow are not made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.devices.streams import Inject
from atomtrain.engine.execution.randomness import micro_batch_seeds
from atomtrain.engine.state.precision import LossScale
from atomtrain.errors import ConfigError
from atomtrain.optimizers import AdamW
from tests.support.injecting import device_with
from tests.support.reference import assert_same_bits, counted, gpt_loss, twin
from tests.support.swapped import LAYERS, gpt, random_delays, token_batches

STEPS = 5
TOO_LARGE = 2.0**21


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(77)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3, weight_decay=0.1)


class Resident:
    """The usual loop in float16 with masters, scaling, unscaling and skipping by hand."""

    def __init__(self, model: nn.Module, scale: float, clip_norm: float | None) -> None:
        values = [parameter.data for parameter in model.parameters()]
        self.model = model.half()
        self.optimizer = adamw(model.parameters())
        for parameter, value in zip(model.parameters(), values, strict=True):
            self.optimizer.set_master(parameter, value.clone())
        self.scale, self.good, self.clip_norm = scale, 0, clip_norm
        self.skipped: list[int] = []

    def train(
        self, steps: Any, steps_to_double: int, weights: list[float] | None = None
    ) -> list[float]:
        history = []
        for number, step in enumerate(steps):
            of = counted(step, weights)
            micro_batches = of.micro_batches
            self.optimizer.zero_grad(set_to_none=True)
            seeds = micro_batch_seeds(len(micro_batches)) if self.random(micro_batches) else []
            after = torch.get_rng_state()
            losses = []
            for index, micro_batch in enumerate(micro_batches):
                if seeds:
                    torch.manual_seed(seeds[index])
                loss = gpt_loss(self.model, micro_batch)
                (of.part(loss, index) * self.scale).backward()
                losses.append(float(loss.detach()))
            if seeds:
                torch.set_rng_state(after)
            history.append(of.mean(losses))
            self.update(number, steps_to_double)
        return history

    def random(self, micro_batches: Any) -> bool:
        dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.model.modules())
        return dropout and len(micro_batches) > 1

    def update(self, number: int, steps_to_double: int) -> None:
        gradients = [p.grad.float() for p in self.model.parameters()]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack(norms)) / self.scale
        if not torch.isfinite(total):
            self.scale, self.good = self.scale / 2, 0
            self.skipped.append(number)
            return
        factor = 1 / self.scale
        if self.clip_norm is not None:
            factor *= float(torch.clamp(self.clip_norm / (total + 1e-6), max=1.0))
        self.optimizer.gradient_factor = factor
        self.optimizer.step()
        self.good += 1
        if self.good == steps_to_double:
            self.scale, self.good = self.scale * 2, 0


def check(
    scale: float,
    steps_to_double: int = 2000,
    micro_batches: int = 2,
    dropout: float = 0.0,
    weights: list[float] | None = None,
    **options: Any,
) -> Resident:
    model, steps = gpt(dropout, tied=False), token_batches(micro_batches, STEPS)
    resident = Resident(twin(model), scale, options.get("clip_norm"))
    state = torch.get_rng_state()
    expected = resident.train(steps, steps_to_double, weights)
    torch.set_rng_state(state)
    with swapped(model, steps, scale, steps_to_double, **options) as engine:
        assert [engine.step(step, weights) for step in steps] == expected
        assert_equal(engine, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
    return resident


def swapped(
    model: nn.Module,
    steps: Any,
    scale: float,
    steps_to_double: int = 2000,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        steps[0][0],
        optimizer=adamw,
        device=device_with(inject, "emulated:1GiB/s", "64MiB"),
        device_memory="64MiB",
        options=atomtrain.Options(
            micro_batches=len(steps[0]),
            precision="fp16",
            loss_scale=scale,
            loss_scale_steps=steps_to_double,
            profile=False,
            **options,
        ),
    )


def assert_equal(engine: atomtrain.Engine, resident: Resident) -> None:
    values, states = engine.state_dict(), engine.optimizer_state()
    for name, parameter in resident.model.named_parameters():
        assert_same_bits(values[name], resident.optimizer.master_of(parameter), name)
        moments = resident.optimizer.state[parameter]
        for key, value in states[name].items():
            assert_same_bits(value, moments[key], name)
        assert len(states[name]) == len(moments) - 1 or not states[name]
    assert engine.loss_scale is not None
    assert engine.loss_scale.state() == {
        "scale": resident.scale,
        "good_steps": resident.good,
        "skipped_steps": len(resident.skipped),
    }


@pytest.mark.parametrize("segments", [1, 3, LAYERS])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_float16_equals_the_usual_loop(segments: int, clip_norm: float | None) -> None:
    assert check(1024.0, segments=segments, clip_norm=clip_norm).skipped == []


def test_micro_batches_that_count_unlike() -> None:
    check(1024.0, micro_batches=3, dropout=0.2, weights=[5, 90, 32], segments=3, clip_norm=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_overflow_are_not_made(seed: int) -> None:
    resident = check(
        TOO_LARGE,
        2,
        micro_batches=1 + seed,
        dropout=0.2,
        segments=LAYERS,
        inject=random_delays(seed),
    )
    assert 0 < len(resident.skipped) < STEPS


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_steps_that_overflow_are_not_made_on_the_device_either(clip_norm: float | None) -> None:
    resident = check(TOO_LARGE, 2, optimizer_on_device=True, clip_norm=clip_norm)
    assert 0 < len(resident.skipped) < STEPS


def test_the_scale_grows_again() -> None:
    resident = check(256.0, steps_to_double=2)
    assert resident.scale == 1024.0
    assert resident.good == 1


def test_training_goes_on_with_the_scale_that_was_saved() -> None:
    model, steps = gpt(tied=False), token_batches(1, 6)
    resident = Resident(twin(model), 2.0**19, None)
    expected = resident.train(steps, 2)
    other = twin(model)
    with swapped(model, steps, 2.0**19, 2) as first:
        before = [first.step(step) for step in steps[:3]]
        assert first.loss_scale is not None
        saved = first.loss_scale.state()
        values = {name: value.clone() for name, value in first.state_dict().items()}
        moments = {
            name: {key: value.clone() for key, value in entry.items()}
            for name, entry in first.optimizer_state().items()
        }
    with swapped(other, steps, 1.0, 2) as second:
        second.load_state_dict(values)
        second.load_optimizer_state(moments)
        assert second.loss_scale is not None
        second.loss_scale.load_state(saved)
        assert before + [second.step(step) for step in steps[3:]] == expected
        assert_equal(second, resident)


def test_what_cannot_be_scaled_is_refused() -> None:
    model, steps = gpt(tied=False), token_batches(1)
    with pytest.raises(ConfigError, match="power of two"):
        atomtrain.Options(precision="fp16", loss_scale=1000.0)
    with pytest.raises(ConfigError, match="at least 1"):
        atomtrain.Options(precision="fp16", loss_scale_steps=0)
    with pytest.raises(ConfigError, match="lacks 'good_steps'"):
        LossScale(65536.0, 2000).load_state({"scale": 4.0})
    with pytest.raises(ConfigError, match="no 'sclae'"):
        LossScale(65536.0, 2000).load_state({"sclae": 4.0})
    for optimizer, message in (
        (torch.optim.AdamW, "keeps float32 masters"),
        (lambda p: AdamW(p, master="split"), "float16 need master='float32'"),
    ):
        with pytest.raises(ConfigError, match=message):
            atomtrain.swap(
                twin(model),
                steps[0][0],
                optimizer=optimizer,
                device="emulated",
                options=atomtrain.Options(precision="fp16", profile=False),
            )
