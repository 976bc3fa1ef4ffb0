"""Operations of exported graphs by the functions through which Python reaches them fastest.

`torch.ops.aten.mul.Tensor` looks for its schema and boxes each argument; `torch.mul` is the same
operation by generated code, in half the time. Where operations are small, a block consists of
little else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

aten, _nn = torch.ops.aten, torch._C._nn
_DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.sqrt.default: torch.sqrt,
    aten.exp.default: torch.exp,
    aten.mean.dim: torch.mean,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.relu.default: torch.relu,
    aten.silu.default: _nn.silu,
    aten.gelu.default: _nn.gelu,
    aten.linear.default: _nn.linear,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.t.default: torch.t,
    aten.sum.dim_IntList: torch.sum,
    aten.matmul.default: torch.matmul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.layer_norm.default: torch.layer_norm,
    aten.scaled_dot_product_attention.default: _nn.scaled_dot_product_attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        torch._scaled_dot_product_flash_attention_for_cpu
    ),
    aten.view.default: Tensor.view,
    aten.reshape.default: Tensor.reshape,
    aten.expand.default: Tensor.expand,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.contiguous.default: Tensor.contiguous,
    aten.clone.default: torch.clone,
    aten.cat.default: torch.cat,
    aten.to.dtype: Tensor.to,
}
"""Functions that take the operation's arguments, by place and by name, as the operation does."""


_MOST_BY_PLACE = {aten.to.dtype: 4}
"""How many arguments functions take by place that take fewer so than their operations."""


def direct(operation: Any, by_place: int = 0) -> Callable[..., Any]:
    """Return the fastest function that does what an operation does, or the operation.

    Args:
        operation: Which one.
        by_place: How many arguments it is given by place.
    """
    if by_place > _MOST_BY_PLACE.get(operation, by_place):
        return operation  # type: ignore[no-any-return]
    function: Callable[..., Any] = _DIRECT.get(operation, operation)
    return function


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """Return a graph's operations as a function, which stays as it is when the graph changes."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        node.meta.clear()
        if node.op == "call_function":
            node.target = direct(node.target, len(node.args))
    function: Callable[..., Any] = fx.GraphModule(nn.Module(), copy).forward
    return function
