"""Counts FLOPs of operations that torch's counter does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

_GROUPED = "grouped_mm_fallback"


def more_counters() -> dict[Any, Callable[..., int]]:
    """Return for each operation a function from the shapes of its arguments to its FLOPs.

    Operations that are not there (libraries that are not imported) are left out.
    """
    aten = torch.ops.aten
    counters: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._scaled_dot_product_fused_attention_overrideable: _attention,
        aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    }
    if hasattr(aten, "_grouped_mm"):
        counters[aten._grouped_mm] = _grouped
    # Mixtures of experts of transformers, in types that the operation above does not take.
    if hasattr(torch.ops.transformers, _GROUPED):
        counters[getattr(torch.ops.transformers, _GROUPED)] = _grouped
        counters[getattr(torch.ops.transformers, f"{_GROUPED}_backward")] = _grouped_backward
    return counters


def _attention(*shapes: Any, **_: Any) -> int:
    return int(sdpa_flop_count(*shapes[:3]))


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(*shapes[:4]))


def _grouped(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row of `left` meets one expert's matrix: `[S, K] x [E, K, N]` is `2 S K N`.

    Without experts on the right, `[K, S] x [S, N]` (gradients of weights) is `2 K S N`, and
    `[E, M, K] x [K, S]` is `2 M K S`.
    """
    rows = math.prod(left[1:]) if len(left) == 3 and len(right) == 2 else math.prod(left)
    return 2 * rows * right[-1]


def _grouped_backward(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _grouped(left, right)
