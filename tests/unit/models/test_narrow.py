"""Which matrices of a frozen model are held in few bits, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.models.lora import add_adapters, begun_layers, narrowing_of
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.models.narrow import NarrowLinear, NarrowParameter
from atomtrain.models.quantised import dequantise, quantise


class Experts(nn.Module):
    """Two experts of `[6, 4]` each, all of which compute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 6, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.einsum("eoi,...i->...eo", self.up, hidden).sum(-2)


class Positions(nn.Module):
    """Three dimensions, but not of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 3, 4))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.table


class Doubled(nn.Linear):
    """Computes otherwise than PyTorch's."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class Model(nn.Module):
    """A model with one of each kind of matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.positions = Positions()
        self.query = nn.Linear(4, 4)
        self.doubled = Doubled(4, 4)
        self.odd = nn.Linear(3, 4, bias=False)
        self.router = nn.Linear(4, 2)
        self.experts = Experts()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.reads = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.positions(self.embedding(ids))
        hidden = self.doubled(self.query(hidden)) + self.odd(hidden[..., :3])
        hidden = self.experts(hidden * self.router(hidden).sigmoid().amax(-1, keepdim=True))
        hidden = self.other(self.one(hidden)) @ self.reads.weight.T
        return self.head(hidden)


NARROW = {"query.weight", "doubled.weight", "experts.up", "reads.weight"}


def narrowed(config: LoraConfig) -> tuple[nn.Module, nn.Module]:
    """Return a model that was narrowed, and an ordinary one with the same rounded matrices."""
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    narrow = narrowing_of(model, config).matrices
    add_adapters(model, config)
    with torch.no_grad():
        for name, layer in begun_layers(model).items():
            own = name.replace("expert_lora.", "") if "expert_lora" in name else f"{name}.weight"
            weight = plain.get_parameter(own)
            for part, values in layer.beginning(lambda weight=weight: weight.float(), name):
                layer.get_parameter(part).copy_(values)
            if config.bits is not None and own in narrow:
                rounded = dequantise(*quantise(weight.flatten(0, -2), config.bits), weight.dtype)
                weight.copy_(rounded.view(weight.shape))
    return model, plain


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("target", ["query", "up", "experts"])
def test_what_is_narrow_does_not_depend_on_what_is_adapted(target: str, bits: int) -> None:
    config = LoraConfig(r=2, targets=(target,), bits=bits)
    found = narrowing_of(Model(), config)
    assert set(found.matrices) == NARROW
    model, plain = narrowed(config)
    kinds = {name: type(m) for name, m in model.named_modules()}
    assert kinds["reads"] is NarrowLinear
    assert kinds["doubled.expert_lora.weight"] is NarrowParameter
    for name in ("odd", "router", "one", "other", "head"):
        assert kinds[name] is nn.Linear, name
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert not any(name.startswith((*NARROW, "experts.up")) for name in wide)
    ids = torch.tensor([[1, 2, 8]])
    torch.testing.assert_close(model(ids), plain(ids))


def test_what_computes_in_16_bits_is_made_so_wide() -> None:
    model, plain = narrowed(LoraConfig(r=2, targets=("query",), bits=8))
    ids = torch.tensor([[1, 2, 8]])
    expected = plain(ids)
    found = model.bfloat16()(ids)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)
    torch.manual_seed(0)
    born = Model().bfloat16()
    add_adapters(born, LoraConfig(r=2, targets=("query",), bits=8))
    assert born.reads.weight.dtype == torch.bfloat16


def test_what_stays_as_it_is_is_told_with_its_reason() -> None:
    told = narrowing_of(Model(), parse_lora("targets=query,bits=4")).told(4)
    assert told == (
        "--lora bits=4 leaves 3 matrices as they are: odd.weight has rows of 3 numbers, which must "
        "be even; one.weight is shared with another layer; other.weight is shared with another "
        "layer"
    )
    saved = parse_lora("targets=query,bits=4,modules_to_save=odd+one+other+doubled")
    found = narrowing_of(Model(), saved)
    assert found.told(4) is None
    assert set(found.matrices) == NARROW - {"doubled.weight"}
    assert narrowing_of(Model(), parse_lora("targets=query")) == ({}, {})
    many = Model()
    many.more = nn.ModuleList(nn.Linear(5, 2) for _ in range(4))
    told = narrowing_of(many, parse_lora("targets=query,bits=8")).told(8)
    assert told is not None
    assert told.startswith("--lora bits=8 leaves 7 matrices")
    assert told.endswith("; and 4 more")


def test_an_adapted_matrix_that_cannot_be_narrow_stays_wide() -> None:
    model, plain = narrowed(LoraConfig(r=2, targets=("odd", "router"), bits=4))
    layer: Any = model.odd
    assert layer.bits is None
    assert torch.equal(layer.weight, plain.odd.weight)
    assert isinstance(model.query, NarrowLinear)


def test_a_classifiers_head_is_not_narrow() -> None:
    class TinyForSequenceClassification(nn.Module):
        config = SimpleNamespace(model_type="tiny")

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.score = nn.Linear(4, 4), nn.Linear(4, 2)

    found = narrowing_of(TinyForSequenceClassification(), parse_lora("bits=4"))
    assert set(found.matrices) == {"inner.weight"}
