"""Which parameters decay, and which are hidden matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atomtrain.errors import ConfigError
from atomtrain.optimizers import decay_groups, muon_groups
from tests.support.engine_models import gpt


def names(model: nn.Module, groups: list[dict[str, object]], index: int) -> set[str]:
    members = {id(p) for p in groups[index]["params"]}  # type: ignore[attr-defined]
    return {name for name, p in model.named_parameters() if id(p) in members}


def test_norms_and_biases_do_not_decay() -> None:
    model = gpt()
    for source in (model, model.named_parameters(), model.parameters(), list(model.parameters())):
        decayed, plain = decay_groups(source, 0.3)
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
        groups = [decayed, plain]
        assert "embedding.token.weight" in names(model, groups, 0)
        assert "blocks.0.qkv.weight" in names(model, groups, 0)
        assert all("norm" in name or "bias" in name for name in names(model, groups, 1))
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_embeddings_may_be_spared() -> None:
    model = gpt()
    groups = decay_groups(model, decay_embeddings=False)
    assert {"embedding.token.weight", "embedding.position.weight"} <= names(model, groups, 1)
    with pytest.raises(ConfigError, match="decay_embeddings=False needs the model"):
        decay_groups(model.parameters(), decay_embeddings=False)


def test_frozen_parameters_are_in_no_group_and_shared_ones_in_one() -> None:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    groups = decay_groups([*model.parameters(), *model.parameters()])
    assert not any("blocks.0" in name for index in (0, 1) for name in names(model, groups, index))
    assert sum(len(g["params"]) for g in groups) == len(names(model, groups, 0)) + len(
        names(model, groups, 1)
    )


def test_an_empty_group_is_left_out() -> None:
    assert len(decay_groups(nn.Linear(2, 3, bias=False))) == 1
    assert [g["weight_decay"] for g in decay_groups(nn.LayerNorm(2))] == [0.0]
    model = nn.Linear(2, 3, bias=False).requires_grad_(False)
    for groups in (decay_groups, muon_groups):
        with pytest.raises(ConfigError, match="nothing can be trained"):
            groups(model)


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_go_to_muon(tied: bool) -> None:
    model = gpt(width=16, vocabulary=64)  # as many tokens as mlp_in has rows
    if not tied:
        model.head.weight = nn.Parameter(torch.zeros(64, 16))
    groups = muon_groups(model)
    assert [g["algorithm"] for g in groups] == ["muon", "adamw", "adamw"]
    hidden = {
        f"blocks.{block}.{name}.weight"
        for block in range(2)
        for name in ("qkv", "attention_out", "mlp_in", "mlp_out")
    }
    assert names(model, groups, 0) == hidden
    rest = {"embedding.token.weight", "embedding.position.weight"}
    assert names(model, groups, 1) == (rest if tied else rest | {"head.weight"})


def test_the_caller_may_choose_the_hidden_matrices() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    groups = muon_groups(model, hidden=lambda name, p: name == "0.weight")
    assert names(model, groups, 0) == {"0.weight"}
    with pytest.raises(ConfigError, match=r"'0.bias' has shape \[3\]; Muon updates matrices only"):
        muon_groups(model, hidden=lambda name, p: True)
