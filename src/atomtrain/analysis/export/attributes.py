"""What forward could change on modules beside tensors, and whether it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.errors import AnalysisError

PLAIN = (bool, int, float, str, bytes, type(None))
HOLDERS = (list, dict, set, np.ndarray)
"""Types of what forward could keep values in."""
_MOST_ELEMENTS = 1000
"""Of a holder that are looked at; of a larger one only their number is."""
_DEEPEST = 3
"""Holders within holders that are looked into."""
_GONE = object()

Values = Mapping[str, Mapping[str, Any]]
"""By place, then by name; compared by `changes_in`."""


class _Same:
    """An object that is equal to itself only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class _Contents(NamedTuple):
    """What a holder holds."""

    kind: type
    size: int
    items: tuple[Any, ...]


def kept(value: Any, depth: int = 0) -> Any:
    """Return what tells whether a value has become another one, whatever its type."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not isinstance(value, HOLDERS) or depth == _DEEPEST:
        return _Same(value)
    items: tuple[Any, ...] = ()
    if len(value) <= _MOST_ELEMENTS:
        if isinstance(value, set):
            items = (frozenset(each for each in value if isinstance(each, PLAIN)),)
        elif isinstance(value, dict):
            items = tuple((kept(k, depth + 1), kept(v, depth + 1)) for k, v in value.items())
        else:
            items = tuple(kept(each, depth + 1) for each in value)
    return _Contents(type(value), len(value), items)


def attributes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what forward could change beside tensors, by module."""
    return {
        path: {
            name: kept(value)
            for name, value in vars(module).items()
            if isinstance(value, PLAIN) or (isinstance(value, HOLDERS) and name[0] != "_")
        }
        for path, module in model.named_modules()
    }


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers, and tensors that are plain attributes, by their paths."""
    found = dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def changes_in(before: Values, after: Values) -> list[tuple[str, str]]:
    """Return the paths and names of what differs between two results of `attributes_of`."""
    nothing: Mapping[str, Any] = {}
    return [
        (path, name)
        for path, own in after.items()
        for name in {**before.get(path, nothing), **own}
        if (own.get(name, _GONE),) != (before.get(path, nothing).get(name, _GONE),)
    ]  # within tuples, what is not equal to itself (NaN) is


@contextmanager
def left_by(model: nn.Module, after: Values) -> Iterator[None]:
    """Have attributes of modules be as a call left them, which torch takes back; in place of what
    became a tensor another one, within lists and dictionaries nothing."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for path, module in model.named_modules():
        own, left = vars(module), after.get(path, {})
        known = attributes_of(module)[""]
        changed.append((own, {name: own[name] for name in known}))
        for name, was in known.items():
            now = left.get(name, _GONE)
            if (now,) == (was,) or isinstance(own[name], set | np.ndarray):
                continue  # those torch leaves as they are
            if isinstance(own[name], HOLDERS):
                own[name] = _held_again(now)
            else:
                own[name] = torch.zeros(()) if now is _GONE else now
    try:
        yield
    finally:
        for own, known in changed:
            own.update(known)


@contextmanager
def restored_if_failed(model: nn.Module) -> Iterator[None]:
    """If a call of a model fails, take back its hooks and what it set on modules.

    If it succeeds, take back tensors without data, as newer versions of torch do themselves.

    Both, since a module may note that it has its hooks: without them, and with that note, later
    calls would go another way.
    """
    own = [(vars(module), dict(vars(module))) for module in model.modules()]
    hooks = [
        (value, dict(value))
        for _, before in own
        for name, value in before.items()
        if "_hooks" in name and isinstance(value, dict)
    ]
    try:
        yield
    except BaseException:
        for value, before in own + hooks:
            value.clear()
            value.update(before)
        raise
    for value, before in own:
        for name in [name for name, left in value.items() if isinstance(left, FakeTensor)]:
            del value[name]
            value.update({name: before[name]} if name in before else {})


def _held_again(now: Any) -> Any:
    """Return such a list or dictionary as `kept` was told of."""
    if not isinstance(now, _Contents):
        return now if isinstance(now, PLAIN) else None
    if now.kind is dict:
        return {_held_again(name): _held_again(value) for name, value in now.items}
    items = [_held_again(item) for item in now.items] or [None] * now.size
    return items if now.kind is list else None


def check_side_effects(before: Values, after: Values) -> None:
    """Raise `AnalysisError` if forward changed what `attributes_of` returned before it."""
    for path, name in changes_in(before, after):
        raise AnalysisError(
            f"forward changes the attribute {name!r} of module {path!r}, which would happen once "
            f"instead of in every step; keep such a state in a registered buffer, {MANUAL}"
        )
