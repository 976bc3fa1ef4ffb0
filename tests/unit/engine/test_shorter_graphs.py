"""Graphs get shorter where they may, and their results keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from atomtrain.engine.execution.shorter_graphs import join_slices, leave_out_views

aten: Any = torch.ops.aten
slice_backward: Callable[..., Tensor] = aten.slice_backward
_MANY = 2**63 - 1
_SHAPE = [2, 3, 8]


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


def _halves(x: Tensor) -> Tensor:
    """Of a whole that was turned: the second half comes from the first, and is negative."""
    first = slice_backward(aten.neg(x[..., :4]), _SHAPE, 2, 4, _MANY, 1)
    return first + slice_backward(x[..., 4:], _SHAPE, 2, 0, 4, 1)


def _uneven(x: Tensor) -> Tensor:
    first = slice_backward(x[..., :3], _SHAPE, -1, 0, 3, 1)
    return first + slice_backward(x[..., 3:], _SHAPE, 2, 3, 8, 1)


def _with_a_gap(x: Tensor) -> Tensor:
    first = slice_backward(x[..., :3], _SHAPE, 2, 0, 3, 1)
    return first + slice_backward(x[..., 4:], _SHAPE, 2, 4, 8, 1)


def _overlapping(x: Tensor) -> Tensor:
    first = slice_backward(x[..., :5], _SHAPE, 2, 0, 5, 1)
    return first + slice_backward(x[..., 4:], _SHAPE, 2, 4, 8, 1)


def _of_two_dimensions(x: Tensor) -> Tensor:
    first = slice_backward(x[:1], _SHAPE, 0, 0, 1, 1)
    return first + slice_backward(x[..., 4:], _SHAPE, 2, 4, 8, 1)


def _in_steps(x: Tensor) -> Tensor:
    first = slice_backward(x[..., ::2], _SHAPE, 2, 0, 8, 2)
    return first + slice_backward(x[..., 1::2], _SHAPE, 2, 1, 8, 2)


def _of_one(x: Tensor) -> Tensor:
    first = slice_backward(x[..., :4], _SHAPE, 2, 0, 4, 1)
    return first + x


def _used_again(x: Tensor) -> Tensor:
    first = slice_backward(x[..., :4], _SHAPE, 2, 0, 4, 1)
    return (first + slice_backward(x[..., 4:], _SHAPE, 2, 4, 8, 1)) * first


def _channels_last(x: Tensor) -> Tensor:
    image = x.reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    size = list(image.shape)
    first = slice_backward(image[:, :1], size, 1, 0, 1, 1)
    return first + slice_backward(image[:, 1:], size, 1, 1, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "joined", "left"),
    [
        (_halves, 1, 0),
        (_uneven, 1, 0),
        (_with_a_gap, 0, 2),
        (_overlapping, 0, 2),
        (_of_two_dimensions, 0, 2),
        (_in_steps, 0, 2),
        (_of_one, 0, 1),
        (_used_again, 1, 1),
    ],
)
def test_halves_are_put_together(
    function: Callable[[Tensor], Tensor], joined: int, left: int, dtype: torch.dtype
) -> None:
    x = torch.randn(_SHAPE, dtype=dtype)
    # Added to zero both zeros become positive.
    x[0, 0], x[0, 1], x[0, 2, ::3] = 0.0, -0.0, float("nan")
    graph = make_fx(function, tracing_mode="fake")(x)
    join_slices(graph.graph)
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(aten.cat.default) == joined
    assert targets.count(aten.slice_backward.default) == left
    found, expected = graph(x), function(x)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(found.view(bits), expected.view(bits))
    assert found.stride() == expected.stride()


def test_what_would_lie_otherwise_stays() -> None:
    x = torch.randn(2, 3, 8)
    graph = make_fx(_channels_last, tracing_mode="fake")(x)
    join_slices(graph.graph)
    graph.recompile()
    found, expected = graph(x), _channels_last(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
