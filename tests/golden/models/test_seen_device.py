"""A model is traced as on the device that will run it, wherever its weights are."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import Chain, chain_of
from atomtrain.analysis.export.export import export
from tests.support import any_models
from tests.support.any_models import Case

X = torch.ones(2, 4)
OTHER = torch.device("meta")
"""A device of another type than the processor: fake tensors can seem to be on it everywhere."""


class AsksForDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.sin() if self.linear.weight.device.type == "cpu" else x.cos()


class NamesNoDevice(AsksForDevice):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(4.0)


class KnowsOneWay(AsksForDevice):
    """Can be traced only where it is told that it is."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("not unawares")
        return self.linear(x)


def described(chain: Chain) -> list[Any]:
    """Return all that layers do, and under what names."""
    return [
        (layer.name, layer.reads, layer.writes, str(layer.module.template.graph))
        for layer in chain.layers
    ]


def operations(model: nn.Module, device: torch.device) -> str:
    call: Callable[..., Any] = lambda model, tensors: model(*tensors)  # noqa: E731
    return str(export(model, [X], call, own_loss=False, device=device).graph)


@pytest.mark.parametrize(
    "make", [any_models.gpt_oss, any_models.qwen3_next], ids=lambda make: make.__name__
)
def test_an_outline_and_a_model_with_weights_give_one_chain(make: Callable[[], Case]) -> None:
    model, draw = make()
    outline = copy.deepcopy(model).to("meta")
    example = draw()
    assert described(chain_of(outline, example).chain) == described(chain_of(model, example).chain)


@pytest.mark.parametrize("at", ["cpu", "meta"])
def test_code_that_asks_for_the_device_sees_the_one_that_will_run_it(at: str) -> None:
    model = AsksForDevice().to(at)
    assert "aten.sin" in operations(model, torch.device("cpu"))
    assert "aten.cos" in operations(model, OTHER)


def test_an_outline_may_name_no_device() -> None:
    assert "aten.arange" in operations(NamesNoDevice().to("meta"), torch.device("cpu"))


def test_being_traced_on_another_path_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atomtrain.analysis"):
        operations(AsksForDevice(), torch.device("cpu"))
        assert not caplog.records
        operations(KnowsOneWay(), torch.device("cpu"))
    [record] = caplog.records
    assert "KnowsOneWay is traced as its code runs when it is traced" in record.getMessage()
    assert "not unawares" in record.getMessage()


def test_a_device_on_which_a_model_cannot_be_traced_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "atomtrain.analysis"):
        assert "aten.arange" in operations(NamesNoDevice(), OTHER)
    [record] = caplog.records
    assert "NamesNoDevice is traced as on cpu, so its results may differ" in record.getMessage()
