"""Values taken apart into tensors and the rest, and put together again around other tensors.

What a model returns may be mappings, tuples, lists, named tuples, dataclasses and any other object
with attributes, so that outputs of every library pass without being registered anywhere
(`take_apart`). Arguments and results of a call become *skeletons* of plain values (`taken_apart`):
two calls with equal skeletons were given the same but for the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)
_OF_SKELETONS = (bool, int, float, str, bytes, type(None))


class _Slot:
    """Stands for the tensor of this index. Not a tuple: outputs of some libraries unpack those."""

    def __init__(self, index: int) -> None:
        self.index = index


def tensors_among(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results of an operation, also those in collections.

    This runs for every operation of a model, and torch's pytrees take a multiple of it.
    """
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_among(*value)
        elif isinstance(value, dict):
            found += tensors_among(*value.values())
    return found


class Structure(NamedTuple):
    tensors: list[Tensor]
    rebuild: Callable[[Sequence[Any]], Any]


def take_apart(value: Any) -> Structure:
    """Return the tensors inside of `value` in a fixed order, and a function that rebuilds it.

    A tensor that occurs twice is listed once. The rebuilt object is of the same types; what is no
    tensor is shared with the original.
    """
    tensors: list[Tensor] = []
    skeleton = _map(value, lambda tensor: _Slot(_number_of(tensor, tensors)), {})
    return Structure(tensors, lambda given: _map(skeleton, None, {}, given))


def _number_of(tensor: Tensor, tensors: list[Tensor]) -> int:
    """Return a tensor's place in a list, to which it is added if it is not there."""
    for index, known in enumerate(tensors):
        if known is tensor:
            return index
    tensors.append(tensor)
    return len(tensors) - 1


def _map(
    value: Any,
    on_tensor: Callable[[Tensor], Any] | None,
    seen: dict[int, Any],
    given: Sequence[Any] = (),
) -> Any:
    if isinstance(value, _Slot):
        return given[value.index]
    if isinstance(value, Tensor):
        return value if on_tensor is None else on_tensor(value)
    if isinstance(value, _PLAIN) or callable(value):
        return value
    if id(value) in seen:  # objects may refer to each other
        return seen[id(value)]

    def inner(item: Any) -> Any:
        return _map(item, on_tensor, seen, given)

    if isinstance(value, tuple):
        items = [inner(item) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [inner(item) for item in value]
    if type(value) is dict:
        return {key: inner(item) for key, item in value.items()}
    # Anything else is copied, and its parts are replaced in the copy.
    other = seen[id(value)] = copy.copy(value)
    if isinstance(value, Mapping) and hasattr(other, "__setitem__"):
        for key in list(value):
            dict_set = dict.__setitem__ if isinstance(other, dict) else type(other).__setitem__
            dict_set(other, key, inner(value[key]))
    for name, item in list(getattr(value, "__dict__", {}).items()):
        other.__dict__[name] = inner(item)
    return other


class Slot(NamedTuple):
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
        return Slot(_number_of(value, tensors))
    if type(value) in (tuple, list):
        return type(value), tuple(taken_apart(item, tensors, opaque) for item in value)
    if type(value) is dict:
        items = tuple((key, taken_apart(item, tensors, opaque)) for key, item in value.items())
        return dict, items
    if type(value) in _OF_SKELETONS or isinstance(value, torch.dtype | torch.device):
        return type(value), value
    raise NotPlainError(type(value).__name__)


def put_together(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(skeleton, Slot):
        return tensors[skeleton.number]
    kind, content = skeleton
    if kind in (tuple, list):
        return kind(put_together(item, tensors) for item in content)
    if kind is dict:
        return {key: put_together(item, tensors) for key, item in content}
    return content
