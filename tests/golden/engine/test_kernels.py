"""Operations choose the kernels that they choose in ordinary training, in every pass.

They look at whether something needs a gradient, and how it lies in memory: without a graph, or with
another layout, some add in another order, or do not give what backward needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import adamw

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH, LENGTH = 12, 7
PASSES = pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])


class Turned(nn.Module):
    """Products of what convolutions leave turned, with weights as they are and computed ones."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.ParameterList(nn.Parameter(torch.rand(WIDTH, 1)) for _ in range(3))
        self.computed = computed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for convolution, linear, scale in zip(
            self.convolutions, self.linears, self.scale, strict=True
        ):
            turned = convolution(x).transpose(1, 2)
            weight = linear.weight * scale if self.computed else linear.weight
            # The scale has a part in any case, so that both models have the same parameters.
            x = F.linear(turned, weight, linear.bias * scale[:, 0]).transpose(1, 2)
        return {"loss": x.pow(2).mean()}


class Spread(nn.Module):
    """A product of its input, whose gradient comes turned."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.convolution(self.linears[0](x).transpose(1, 2)).transpose(1, 2)
        return {"loss": self.linears[2](torch.tanh(self.linears[1](x))).pow(2).mean()}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)[0] + x
        return {"loss": x.pow(2).mean()}


def check(model: nn.Module, steps: list[list[dict[str, Tensor]]], activations: Any) -> None:
    """Train and evaluate beside an ordinary loop; compare every bit."""
    reference = twin(model)
    resident = adamw(reference.parameters())
    with swap(
        model, steps[0][0], optimizer=adamw, segments=3, host_layers=0, activations=activations,
        micro_batches=len(steps[0]),
    ) as engine:  # fmt: skip
        for step in steps:
            expected = train(reference, [step], resident, lambda m, batch: m(**batch)["loss"])
            assert [engine.step(step)] == expected
            with torch.no_grad():
                expected = [float(twin(reference).eval()(**batch)["loss"]) for batch in step]
            assert engine.evaluate(step) == sum(expected) / len(expected)
        assert_equal_training(engine, reference, resident)


@PASSES
@pytest.mark.parametrize("computed", [False, True])
def test_products_of_what_is_not_contiguous(activations: Any, computed: bool) -> None:
    steps = [[{"x": torch.randn(3, WIDTH, LENGTH)} for _ in range(2)] for _ in range(3)]
    check(Turned(computed), steps, activations)


@PASSES
def test_an_expanded_input(activations: Any) -> None:
    steps = [[{"x": torch.randn(1, LENGTH, WIDTH).expand(2, -1, -1)}] for _ in range(6)]
    check(Spread(), steps, activations)


@PASSES
def test_recurrent_layers(activations: Any) -> None:
    steps = [[{"x": torch.randn(2, LENGTH, WIDTH)} for _ in range(2)] for _ in range(3)]
    check(Recurrent(), steps, activations)
