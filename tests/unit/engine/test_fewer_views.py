"""What is left out of a graph of operations, and that its results are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from atomtrain.engine.execution.fewer_views import leave_out_views

aten = torch.ops.aten


def _repeated(x: Tensor) -> Tensor:
    return aten.view(x, [12]) * 2 + aten.view(x, [12])


def _again(x: Tensor) -> Tensor:
    return aten.view(aten.view(aten.view(x, [12]), [2, 6]), [4, 3]) + 1


def _back(x: Tensor) -> Tensor:
    return aten.view(aten.view(x, [12]), [3, 4]) + 1


def _first_power(x: Tensor) -> Tensor:
    return aten.pow(x, 1.0) * 2


def _of_transposed(x: Tensor) -> Tensor:
    return aten.view(aten.view(aten.t(x), [4, 3, 1]), [4, 3]) * 3


def _in_other_ways(x: Tensor) -> Tensor:
    return aten.unsqueeze(x, 0) * 2 + aten.unsqueeze(x, -1).sum()


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (_repeated, ["view", "mul", "add"]),
        (_again, ["view", "add"]),
        (_back, ["add"]),
        (_first_power, ["mul"]),
        (_of_transposed, ["t", "view", "view", "mul"]),
        (_in_other_ways, ["unsqueeze", "mul", "unsqueeze", "sum", "add"]),
    ],
)
def test_only_looks_are_left_out(function: Callable[[Tensor], Tensor], left: list[str]) -> None:
    x = torch.randn(3, 4)
    traced = make_fx(function, tracing_mode="fake")(x)
    leave_out_views(traced.graph)
    traced.recompile()
    calls = [node for node in traced.graph.nodes if node.op == "call_function"]
    assert [node.target.overloadpacket.__name__ for node in calls] == left
    found, expected = traced(x), function(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_a_power_of_one_of_what_is_not_contiguous_is_computed() -> None:
    traced = make_fx(lambda x: aten.pow(aten.t(x), 1.0), tracing_mode="fake")(torch.randn(3, 4))
    leave_out_views(traced.graph)
    assert any(node.target is aten.pow.Tensor_Scalar for node in traced.graph.nodes)
