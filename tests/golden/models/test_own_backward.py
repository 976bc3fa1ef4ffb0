"""Calls of `torch.autograd.Function` in swapped training: the bits of an ordinary loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers as hf

from tests.golden.models.test_any_model import check
from tests.support import any_models
from tests.support.any_models import Case
from tests.support.own_backward import own_backward

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("blocks", [3, 7])
def test_results_without_gradient_and_gradients_that_are_none(
    blocks: int, micro_batches: int
) -> None:
    """Of seven equal blocks one is traced for all."""
    check(own_backward(blocks), micro_batches, segments=3)


def test_random_numbers_are_drawn_in_order() -> None:
    """Also those whose result nobody reads."""
    check(own_backward(3, noisy=True), micro_batches=1, segments=2)


def recurrent_gemma() -> Case:
    config = hf.RecurrentGemmaConfig(
        **any_models._GROUPED, head_dim=8, lru_width=32, attention_window_size=6,
        block_types=["recurrent", "attention"],
    )  # fmt: skip
    return any_models._language_model(hf.RecurrentGemmaForCausalLM(config))


def phimoe() -> Case:
    config = hf.PhimoeConfig(**any_models._GROUPED, num_local_experts=4)
    return any_models._language_model(hf.PhimoeForCausalLM(config))


def bloom() -> Case:
    config = hf.BloomConfig(vocab_size=any_models.VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return any_models._language_model(hf.BloomForCausalLM(config))


@pytest.mark.parametrize("make", [recurrent_gemma, phimoe, bloom], ids=lambda make: make.__name__)
def test_hugging_face_models(make: Callable[[], Case]) -> None:
    check(make(), micro_batches=1, segments=3)
