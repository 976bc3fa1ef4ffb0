"""A weight that several layers use has the same gradient wherever the cuts are.

Autograd adds what layers contribute one by one, from the last layer to the first. A segment that
uses the weight more than once goes on from what later segments have added.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Layer
from tests.support.planning_models import random_shape, use_shape
from tests.support.swapped import check

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH = 40


class _Activated(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.linear(value))


class _Sum(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.sum()


class Again(nn.Module):
    """Five layers of two weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        a, b = (_Activated(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.inner = nn.ModuleList([a, b, a, b, a])
        self.head, self.last = nn.Linear(WIDTH, 1), _Sum()

    def chain_layers(self) -> list[Layer]:
        inner = [
            Layer(f"inner.{index}", module, (f"h{index}",), (f"h{index + 1}",))
            for index, module in enumerate(self.inner)
        ]
        head = Layer("head", self.head, ("h5",), ("out",))
        return [*inner, head, Layer("last", self.last, ("out",), ("loss",))]

    def forward(self, h0: Tensor) -> Tensor:
        value = h0
        for module in self.inner:
            value = module(value)
        loss: Tensor = self.last(self.head(value))
        return loss


@pytest.mark.parametrize("seed", range(40))
def test_any_cuts(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    use_shape(monkeypatch, random_shape(source, 7, 3, mixed=seed % 3 > 0))
    rows = source.choice([2, 20, 60])
    steps = [[{"h0": torch.randn(rows, WIDTH)}] for _ in range(2)]
    check(Again(), steps, loss_of=lambda model, batch: model(**batch))
