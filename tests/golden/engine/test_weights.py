"""Micro-batches that count unlike: the bits of a loop that multiplies each loss by its weight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.errors import ConfigError
from atomtrain.models import GPT
from tests.support.reference import assert_same_bits, twin
from tests.support.swapped import LAYERS, check, gpt, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
TARGETS = [51, 7, 33]
"""Of three micro-batches."""


@pytest.mark.parametrize("segments", [1, 3, LAYERS])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_swapped_equals_resident(segments: int, dropout: float) -> None:
    model, steps = gpt(dropout, tied=False), token_batches(3)
    check(model, steps, weights=TARGETS, segments=segments, clip_norm=0.5)


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
@pytest.mark.parametrize("unit", [1, 1 / sum(TARGETS)])
def test_whatever_graphs_do(activations: Any, unit: float) -> None:
    """Weights are of any unit; those that add up to 1 are what losses are multiplied by."""
    weights = [unit * count for count in TARGETS]
    model, steps = gpt(0.2, tied=False), token_batches(3)
    check(model, steps, weights=weights, segments=3, activations=activations)


@pytest.mark.parametrize("options", [{"host_layers": 1}, {"optimizer_on_device": True}], ids=str)
def test_wherever_things_lie(options: dict[str, Any]) -> None:
    check(gpt(tied=False), token_batches(3), weights=TARGETS, segments=3, **options)


def test_bfloat16_losses() -> None:
    model = gpt(tied=False).to(torch.bfloat16)
    check(model, token_batches(3), weights=TARGETS, segments=3)


def test_a_head_in_pieces() -> None:
    whole = gpt(tied=False)
    model = GPT(dataclasses.replace(whole.config, head_pieces=4))
    model.head.weight = nn.Parameter(whole.head.weight.detach().clone())
    check(model, token_batches(3), weights=TARGETS, segments=3)


@pytest.mark.parametrize("weights", [[5, 0, 9], [0, 4, 0]])
def test_one_of_weight_0_does_not_run(weights: list[float]) -> None:
    check(gpt(0.3, tied=False), token_batches(3), weights=weights, segments=3)


@pytest.mark.parametrize("weights", [[17, 17, 17], [1 / 3] * 3, [0.1] * 3])
def test_alike_ones_change_no_bit(weights: list[float]) -> None:
    model, steps = gpt(tied=False), token_batches(3)
    plain, example = twin(model), steps[0][0]
    with (
        swap(model, example, micro_batches=3) as engine,
        swap(plain, example, micro_batches=3) as known,
    ):
        assert [engine.step(step, weights) for step in steps] == [known.step(s) for s in steps]
        for name, tensor in known.state_dict().items():
            assert_same_bits(engine.state_dict()[name], tensor, name)


def test_every_target_counts_alike() -> None:
    """A step on micro-batches with few and many targets is that on all of them at once."""
    [batches] = token_batches(3, 1)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    for batch, count in zip(batches, TARGETS, strict=True):
        labels = batch["labels"].clone()
        labels.view(-1)[count:] = -100
        batch["labels"] = labels
    whole["labels"] = torch.cat([batch["labels"] for batch in batches])
    model = gpt(tied=False)
    at_once = float(model(**whole).loss.detach())
    with swap(model, batches[0], micro_batches=3) as engine:
        assert engine.evaluate(batches, TARGETS) == pytest.approx(at_once, abs=1e-6)
        assert engine.evaluate(batches) != pytest.approx(at_once, abs=1e-4)
        assert engine.step(batches, TARGETS) == pytest.approx(at_once, abs=1e-6)


@pytest.mark.parametrize(
    "weights", [[1, 2], [1, 2, 3, 4], [1, -1, 3], [0, 0, 0], [1, 2, float("nan")], []], ids=str
)
def test_weights_that_cannot_be(weights: list[float]) -> None:
    model, steps = gpt(tied=False), token_batches(3)
    before = twin(model)
    with swap(model, steps[0][0], micro_batches=3) as engine:
        for run in (engine.step, engine.evaluate):
            with pytest.raises(ConfigError, match="weights must be 3 numbers from 0 on"):
                run(steps[0], weights)
        engine.synchronize()
        for name, tensor in before.state_dict().items():
            assert_same_bits(engine.state_dict()[name], tensor, name)
        engine.step(steps[0])
