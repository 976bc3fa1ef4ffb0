"""Host memory that begins at a page."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atomtrain.planning.plan.disk import PAGE_BYTES, paged


def aligned_empty(n_bytes: int, empty: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return uint8 memory that begins at a page, as direct I/O needs it.

    Args:
        n_bytes: How much.
        empty: Allocates it, such as `Device.host_empty`; `None` is ordinary memory.
    """
    n_bytes = paged(n_bytes)
    whole = (empty or _ordinary)(n_bytes + PAGE_BYTES)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + n_bytes]


def _ordinary(n_bytes: int) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)
