"""What is called directly is the operation that the exported graph names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from atomtrain.analysis.layers.direct_calls import _DIRECT, direct, function_of

aten = torch.ops.aten
ROWS, SQUARE = (2, 6), (4, 4)


class Seen(TorchDispatchMode):
    """Takes note of the operations that reach the device, and of what they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def arguments_of(operation: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments for an operation, as exported graphs give them."""
    value, other, square = torch.rand(ROWS), torch.rand(ROWS), torch.rand(SQUARE)
    heads = torch.rand(1, 2, 4, 8)
    special: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        aten.add.Tensor: ((value, other), {"alpha": 2}),
        aten.sub.Tensor: ((value, 0.25), {}),
        aten.mul.Tensor: ((value, 3), {}),
        aten.div.Tensor: ((value, other), {}),
        aten.pow.Tensor_Scalar: ((value, 2), {}),
        aten.mean.dim: ((value, [-1], True), {"dtype": torch.float64}),
        aten.sum.dim_IntList: ((value, [0], True), {}),
        aten.gelu.default: ((value,), {"approximate": "tanh"}),
        aten.linear.default: ((value, torch.rand(3, 6), torch.rand(3)), {}),
        aten.mm.default: ((square, square), {}),
        aten.bmm.default: ((square[None], square[None]), {}),
        aten.addmm.default: ((torch.rand(4), square, square), {}),
        aten.matmul.default: ((heads, heads.transpose(-1, -2)), {}),
        aten.native_layer_norm.default: ((value, [6], None, None, 1e-5), {}),
        aten.layer_norm.default: ((value, [6], torch.rand(6), torch.rand(6), 1e-3), {}),
        aten.scaled_dot_product_attention.default: (
            (heads, heads, heads, None, 0.0, True),
            {"scale": 0.5},
        ),
        aten._scaled_dot_product_flash_attention_for_cpu.default: (
            (heads, heads, heads, 0.0, True),
            {"scale": 0.5},
        ),
        aten.view.default: ((value, [3, -1]), {}),
        aten.reshape.default: ((value.t(), [3, -1]), {}),
        aten.expand.default: ((value[:1], [2, 6]), {}),
        aten.transpose.int: ((value, 0, 1), {}),
        aten.permute.default: ((value, [1, 0]), {}),
        aten.unsqueeze.default: ((value, 1), {}),
        aten.contiguous.default: ((value.t(),), {"memory_format": torch.contiguous_format}),
        aten.clone.default: ((value.t(),), {"memory_format": torch.contiguous_format}),
        aten.cat.default: (([value, other], -1), {}),
        aten.to.dtype: ((value, torch.float64), {}),
    }
    return special.get(operation, ((value,), {}))


def done(function: Callable[..., Any], operation: Any) -> tuple[list[str], list[Any]]:
    """Return what was called, and result and gradients."""
    torch.manual_seed(3)
    args, kwargs = arguments_of(operation)
    for one in args:
        if isinstance(one, Tensor) and one.is_leaf:
            one.requires_grad_()
    with Seen() as seen:
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if first.requires_grad:
            first.double().pow(2).sum().backward()
    leaves = [one.grad for one in args if isinstance(one, Tensor) and one.is_leaf]
    return seen.calls, [first.detach(), first.stride(), first.dtype, *leaves]


@pytest.mark.parametrize("operation", _DIRECT, ids=str)
def test_it_is_the_same_operation(operation: Any) -> None:
    calls, results = done(operation, operation)
    direct_calls, direct_results = done(direct(operation), operation)
    assert calls == direct_calls
    for one, other in zip(results, direct_results, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_others_stay_as_they_are() -> None:
    assert direct(aten.slice.Tensor) is aten.slice.Tensor


def test_what_functions_take_by_name_only_stays_with_the_operation() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    by_place = (given, torch.float64, False, False, torch.contiguous_format)
    graph.output((graph.call_function(aten.to.dtype, by_place),))
    (result,) = function_of(graph)(torch.ones(2, 3).t())
    assert result.is_contiguous()
    assert result.dtype is torch.float64


def test_a_function_does_not_change_with_its_graph() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(aten.neg.default, (given,))
    graph.output((made,))
    function = function_of(graph)
    made.target = aten.exp.default
    assert torch.equal(function(torch.ones(2))[0], -torch.ones(2))
