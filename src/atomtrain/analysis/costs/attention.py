"""What fused attention's backward on a GPU takes beside its results; no operation returns it.

In 16 bits the kernels add up the query's gradient in float32 (`dq_accum` of FlashAttention-2, the
workspace of the memory-efficient kernel and of cuDNN's), and keep a sum for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    if not torch.are_deterministic_algorithms_enabled() or not torch.cuda.is_available():
        return 1
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return -(-int(processors) // heads)
