"""What is generated at the end of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.training.samples import tell_samples

VOCABULARY = 50


class Anything(nn.Module):
    """Thinks every token as likely as any other."""

    def forward(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=torch.zeros(*ids.shape, VOCABULARY))


def samples(name: str, seed: int = 0) -> list[str]:
    told: list[str] = []
    sizes, tokenizer = SimpleNamespace(context=8), SimpleNamespace(
        separator=VOCABULARY, encode=lambda _: [1], decode=lambda ids: " ".join(map(str, ids))
    )  # fmt: skip
    session: Any = SimpleNamespace(
        engine=SimpleNamespace(synchronize=lambda: None), model=Anything(), name=name,
        recipe=SimpleNamespace(seed=seed, sizes=sizes), options=SimpleNamespace(prompt="a"),
        text=SimpleNamespace(tokenizer=tokenizer),
    )  # fmt: skip
    events: Any = SimpleNamespace(emit=lambda _, prompt, text: told.append(text))
    tell_samples(session, events)
    return told


def test_peers_with_one_model_tell_different_things() -> None:
    told = samples("peer-0")
    assert len(told) == len(set(told)) == 3
    assert samples("peer-0") == told
    assert not set(samples("peer-1")) & set(told)
    assert not set(samples("peer-0", seed=1)) & set(told)
