"""What a model returns, taken apart into tensors and put together again.

Knows mappings, tuples, lists, named tuples, dataclasses and any other object with attributes, so
that outputs of every library pass without being registered anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


class _Slot:
    """Stands for the tensor of this index. Not a tuple: outputs of some libraries unpack those."""

    def __init__(self, index: int) -> None:
        self.index = index


class Structure(NamedTuple):
    """Tensors of an object, and how the object is rebuilt around others."""

    tensors: list[Tensor]
    rebuild: Callable[[Sequence[Any]], Any]


def take_apart(value: Any) -> Structure:
    """Return the tensors inside of `value` in a fixed order, and a function that rebuilds it.

    A tensor that occurs twice is listed once. The rebuilt object is of the same types; what is no
    tensor is shared with the original.
    """
    tensors: list[Tensor] = []
    skeleton = _map(value, lambda tensor: _slot(tensors, tensor), {})
    return Structure(tensors, lambda given: _map(skeleton, None, {}, given))


def _slot(tensors: list[Tensor], tensor: Tensor) -> _Slot:
    for index, known in enumerate(tensors):
        if known is tensor:
            return _Slot(index)
    tensors.append(tensor)
    return _Slot(len(tensors) - 1)


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
