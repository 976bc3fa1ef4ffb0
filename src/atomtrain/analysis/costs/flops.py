"""What torch does not count: FLOPs of some operations, and bytes that attention takes inside.

On a GPU, in 16 bits, backward of fused attention adds up the query's gradient in float32
(`dq_accum` of FlashAttention-2, the workspace of the memory-efficient kernel and of cuDNN's), and
keeps a sum for each row. No operation returns these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

_GROUPED = "grouped_mm_fallback"
_ATTENTIONS = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
]  # fmt: skip


def more_counters() -> dict[Any, Callable[..., int]]:
    """Return for each operation a function from the shapes of its arguments to its FLOPs.

    Operations that are not there (libraries that are not imported) are left out.
    """
    aten = torch.ops.aten
    counters: dict[Any, Callable[..., int]] = {}
    for name in _ATTENTIONS:
        counters[getattr(aten, name)] = _attention
        counters[getattr(aten, f"{name}_backward")] = _attention_backward
    if hasattr(aten, "_grouped_mm"):
        counters[aten._grouped_mm] = _grouped
    # Mixtures of experts of transformers, in types that the operation above does not take. In older
    # versions their backward is made of operations that are counted anyway.
    for name, count in ((_GROUPED, _grouped), (f"{_GROUPED}_backward", _grouped_backward)):
        if hasattr(torch.ops.transformers, name):
            counters[getattr(torch.ops.transformers, name)] = count
    return counters


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, _with_heads_of(query, key), _with_heads_of(query, value)))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    key, value = _with_heads_of(query, key), _with_heads_of(query, value)
    return int(sdpa_backward_flop_count(gradient, query, key, value))


def _with_heads_of(query: Sequence[int], other: Sequence[int]) -> list[int]:
    """Several heads of the query may share one of key and value, which torch 2.9 does not count."""
    return [other[0], query[1], *other[2:]]


def _grouped(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row of `left` meets one expert's matrix: `[S, K] x [E, K, N]` is `2 S K N`.

    Without experts on the right, `[K, S] x [S, N]` (gradients of weights) is `2 K S N`, and
    `[E, M, K] x [K, S]` is `2 M K S`.
    """
    rows = math.prod(left[1:]) if len(left) == 3 and len(right) == 2 else math.prod(left)
    return 2 * rows * right[-1]


def _grouped_backward(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _grouped(left, right)


_ROWS, _COLUMNS = 128, 32
"""Tokens and widths of heads are rounded up to these in the kernels' own memory."""
_ON_GPU = ("flash", "efficient", "cudnn", "fused")
_ON_PROCESSOR = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def attention_workspace_bytes(func: Any, args: Sequence[Any], *, on_gpu: bool) -> int:
    """Return what an operation takes inside itself; 0 but for backward of fused attention.

    With deterministic algorithms FlashAttention adds up in a copy for each group of processors.

    Args:
        func: The operation.
        args: Of it: the gradient of what came out, then query, key and value, each `[B, H, T, D]`.
        on_gpu: Take the processor's attention for the one that a GPU has in its place.
    """
    name = str(func)
    if not name.startswith("aten._scaled_dot_product_") or "attention" not in name:
        return 0
    if "_backward" not in name or not (on_gpu if name == _ON_PROCESSOR else _of_gpu(name)):
        return 0
    query, key = args[1], args[2]
    if not isinstance(query, Tensor) or query.element_size() != 2:
        return 0
    batch, heads, tokens, width = query.shape
    rows, columns = -(-tokens // _ROWS) * _ROWS, -(-width // _COLUMNS) * _COLUMNS
    copies = _splits(batch * heads) if "flash" in name else 1
    n_bytes: int = 4 * batch * heads * rows * (copies * columns + 1)
    if key.shape[1] != heads:  # gradients of key and value, one for each head of the query
        n_bytes += 2 * query.element_size() * batch * heads * key.shape[2] * width
    return n_bytes


def _of_gpu(name: str) -> bool:
    return "_for_cpu" not in name and any(kind in name for kind in _ON_GPU)


def _splits(heads: int) -> int:
    if not torch.are_deterministic_algorithms_enabled() or not torch.accelerator.is_available():
        return 1
    there = torch.get_device_module()
    if not hasattr(there, "get_device_properties"):  # Apple's
        return 1
    found = there.get_device_properties(there.current_device())
    return -(-int(getattr(found, "multi_processor_count", 1)) // heads)
