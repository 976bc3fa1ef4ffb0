"""Documents that share a sequence and do not see each other.

*Documents* are `[B, T]` integers: positions of a sequence that have the same number belong to the
same document, which lies in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor


def places(documents: Tensor) -> Tensor:
    """Return the place of each position within its document, `[B, T]` int64, from 0."""
    index = torch.arange(documents.shape[-1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(begins, index, 0).cummax(-1).values
    return index - starts


def own_past(documents: Tensor) -> Tensor:
    """Return what each position may see, `[B, 1, T, T]` bool: its document up to itself."""
    length = documents.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & causal
