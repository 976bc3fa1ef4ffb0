"""Arguments and results of a call without their tensors: plain values, and slots for the tensors.

Two calls with equal skeletons were given the same but for the tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Slot(NamedTuple):
    """Stands for the tensor of this number."""

    number: int


class NotPlainError(Exception):
    """Something is neither a tensor nor a plain value; names its type."""


def taken_apart(value: Any, tensors: list[Tensor], opaque: type | None = None) -> Hashable:
    """Return what `value` is but for its tensors, which are added to the list, each once.

    Args:
        value: Tensors and plain values, in tuples, lists and dictionaries.
        tensors: Those that are known; found by identity.
        opaque: A type of which all objects are the same.

    Raises:
        NotPlainError: there is something else in it.
    """
    if opaque is not None and type(value) is opaque:
        return opaque, None
    if isinstance(value, Tensor):
        for index, known in enumerate(tensors):
            if known is value:
                return Slot(index)
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if type(value) in (tuple, list):
        return type(value), tuple(taken_apart(item, tensors, opaque) for item in value)
    if type(value) is dict:
        items = tuple((key, taken_apart(item, tensors, opaque)) for key, item in value.items())
        return dict, items
    if type(value) in _PLAIN or isinstance(value, torch.dtype | torch.device):
        return type(value), value
    raise NotPlainError(type(value).__name__)


def put_together(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what a skeleton is of, around other tensors; without opaque objects."""
    if isinstance(skeleton, Slot):
        return tensors[skeleton.number]
    kind, content = skeleton
    if kind in (tuple, list):
        return kind(put_together(item, tensors) for item in content)
    if kind is dict:
        return {key: put_together(item, tensors) for key, item in content}
    return content
