"""What is left out of an export changes neither its operations nor the lines that errors name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.flattening import place_of
from atomtrain.analysis.export.plain_trace import plain_trace


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = x.mean()
        return self._helped(self.inner(self.linear(x))) + shift

    def _helped(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def nodes_of(model: nn.Module) -> list[fx.Node]:
    program = torch.export.export(model, (torch.ones(2, 3),), strict=False)
    whole = program.graph_module
    (body,) = (m for m in whole.modules() if isinstance(m, fx.GraphModule) and m is not whole)
    return [*whole.graph.nodes, *body.graph.nodes]


def test_operations_and_their_lines_stay_as_they_are() -> None:
    whole = nodes_of(Outer())
    with plain_trace():
        plain = nodes_of(Outer())
    assert [(n.op, n.target, str(n.args)) for n in plain] == [
        (n.op, n.target, str(n.args)) for n in whole
    ]
    assert [place_of(node) for node in plain] == [place_of(node) for node in whole]
    places = "".join(map(place_of, plain))
    assert "(return torch.tanh(x) * 2)" in places
    assert "(shift = x.mean())" in places


def test_torch_is_as_before_afterwards() -> None:
    before = vars(fx.proxy)["CapturedTraceback"]
    with pytest.raises(RuntimeError), plain_trace():
        torch.ones(2).reshape(3)
    assert vars(fx.proxy)["CapturedTraceback"] is before
    assert fx._lazy_graph_module._get_graph_module_cls() is fx.GraphModule
