"""A head in pieces: swapped training equals resident training with the same pieces bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_models import swap
from reference import HeadFirst, assert_equal_training, gpt_loss, train, twin
from torch import Tensor, nn

from atomtrain.models import GPT, GPTConfig

STEPS = 3
CONFIG = GPTConfig(layers=2, width=30, heads=3, head_width=7, vocabulary=101, context=19)

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4321)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def gpt(pieces: int, tied: bool = True) -> GPT:
    model = GPT(dataclasses.replace(CONFIG, head_pieces=pieces))
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(CONFIG.vocabulary, CONFIG.width) * 0.02)
    return model


def token_steps(micro_batches: int) -> list[list[dict[str, Tensor]]]:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(CONFIG.vocabulary, (3, 18))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return [[batch() for _ in range(micro_batches)] for _ in range(STEPS)]


def check(
    model: nn.Module, reference: nn.Module, steps: list[list[dict[str, Tensor]]], **options: Any
) -> None:
    """Swap the model; train the reference as it is; compare every bit."""
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, gpt_loss)
    options.setdefault("micro_batches", len(steps[0]))
    with swap(model, steps[0][0], optimizer=adamw, **options) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("pieces", [4, 7])
def test_tied_gpt_with_one_micro_batch(pieces: int, segments: int) -> None:
    model = gpt(pieces)
    check(model, twin(model), token_steps(1), segments=segments)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_untied_gpt(micro_batches: int, segments: int) -> None:
    model = gpt(4, tied=False)
    check(model, twin(model), token_steps(micro_batches), segments=segments)


def test_tied_gpt_with_three_micro_batches_adds_the_heads_gradients_first() -> None:
    model, steps = gpt(4), token_steps(3)
    head_first = HeadFirst(twin(model))
    resident = adamw([p for p in head_first.parameters() if p is not head_first.alias])
    expected = [head_first.step(micro_batches, resident) for micro_batches in steps]
    with swap(model, steps[0][0], optimizer=adamw, micro_batches=3, segments=3) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        state = engine.state_dict()
        for name, tensor in head_first.gpt.state_dict().items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_option_is_the_models_own_choice(micro_batches: int) -> None:
    """A model without pieces, swapped with 4, is a resident model with 4; and the other way."""
    steps = token_steps(micro_batches)
    for own, asked in ((1, 4), (4, 1), (2, 5)):
        model = gpt(own, tied=False)
        reference = gpt(asked, tied=False)
        reference.load_state_dict(model.state_dict())
        check(model, reference, steps, head_pieces=asked, segments=2)
        assert model.head.pieces == own, "the caller's model is left as it is"


def test_one_piece_and_none_keep_the_bits() -> None:
    steps = token_steps(1)
    for pieces in (1, None):
        model = gpt(1)
        check(model, twin(model), steps, head_pieces=pieces)


def test_evaluation_computes_the_same_loss() -> None:
    model, [[batch], *_] = gpt(4), token_steps(1)
    with torch.no_grad():
        expected = float(model.eval()(**batch).loss)
    with swap(model, batch, optimizer=adamw) as engine:
        assert engine.evaluate([batch]) == expected
