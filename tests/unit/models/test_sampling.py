"""Sampled text: what was computed of earlier tokens is kept, and changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atomtrain.models import GPT, GPTConfig
from atomtrain.models.sampling import sample

CONTEXT = 12


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        config = GPTConfig(
            layers=3, width=32, heads=2, head_width=16, vocabulary=97, context=CONTEXT, dropout=0.5
        )
        model = GPT(config)
        for parameter in model.parameters():  # as drawn, all tokens are nearly as likely
            parameter.data.mul_(4)
        return model.double().eval()


def whole(model: GPT, prompt: torch.Tensor, tokens: int) -> Iterator[int]:
    """Compute everything anew for each token."""
    ids = prompt
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids[None, -CONTEXT:]).logits
        ids = torch.cat([ids, logits[0, -1:].argmax(-1)])
        yield int(ids[-1])


@pytest.mark.parametrize("length", [1, 5, CONTEXT, CONTEXT + 3])
def test_the_likeliest_tokens_are_those_of_the_whole_text(model: GPT, length: int) -> None:
    """Also where the text grows past the context."""
    prompt = torch.arange(length) * 7 % 97
    found = sample(model, prompt, 0.0, torch.Generator(), CONTEXT)
    expected = list(whole(model, prompt, 2 * CONTEXT))
    assert len(set(expected)) > 3
    assert list(itertools.islice(found, 2 * CONTEXT)) == expected


def test_within_the_context_each_token_is_computed_once(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    continued = GPT.continued

    def counted(self: GPT, ids: torch.Tensor, past: Any) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return continued(self, ids, past)

    monkeypatch.setattr(GPT, "continued", counted)
    tokens = sample(model, torch.arange(4), 0.8, torch.Generator().manual_seed(0), CONTEXT)
    list(itertools.islice(tokens, 2 * CONTEXT))
    assert lengths == [4] + [1] * (CONTEXT - 4)
