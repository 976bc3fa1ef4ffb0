"""Costs that tests measure once are those of the layer at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import Chain, Layer
from atomtrain.analysis.costs import costs
from atomtrain.analysis.layers.trace import chain_of
from tests.support import known_costs
from tests.support.engine_models import gpt, square, tokens


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measure equal layers once; list those that were measured."""
    names: list[str] = []
    measure = known_costs._measure

    def listed(layer: Layer, *given: Any, **more: Any) -> Any:
        names.append(layer.name)
        return measure(layer, *given, **more)

    monkeypatch.setattr(known_costs, "_known", {})
    monkeypatch.setattr(known_costs, "_measure", listed)
    monkeypatch.setattr(costs, "_measure", known_costs.measured_once)
    return names


def exported(width: int) -> tuple[Chain, dict[str, Any]]:
    """Return a chain of operations, and its inputs."""
    value = torch.ones(2, width)
    traced = chain_of(nn.Sequential(nn.Linear(width, width), nn.ReLU()), value, square, None)
    return traced.chain, traced.bind(value)


def test_they_are_the_same_as_measured_anew(measured: list[str]) -> None:
    batch = tokens()
    traced = chain_of(gpt(), batch, None, None)
    cases = [(traced.chain, traced.bind(batch)), exported(8), exported(8), exported(9)]
    found = [costs.layer_costs(*case) for case in cases]
    assert found[1] == found[2] != found[3]
    count = len(measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_measure", known_costs._measure)
        assert [costs.layer_costs(*case) for case in cases] == found
    again = len(measured) - count
    assert 0 < count < again


def test_what_does_otherwise_is_measured_anew(measured: list[str]) -> None:
    def twice(_: nn.Module, __: Any, result: Tensor) -> Tensor:
        return result + result.exp()

    def of_class() -> nn.Module:
        class Own(nn.Module):
            def forward(self, value: Tensor) -> Tensor:
                return value * 2

        return nn.Sequential(Own())

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(twice)
    calling = nn.Linear(4, 4)
    calling.function = square  # type: ignore[assignment]
    for module in (nn.Linear(4, 4), hooked, calling, of_class(), of_class()):
        layer = Layer("one", module, ("x",), ("y",))
        spec = costs._spec_of(torch.ones(2, 4))
        known_costs.measured_once(layer, [spec], "kind", torch.device("cpu"), on_gpu=False)
    assert len(measured) == 5
