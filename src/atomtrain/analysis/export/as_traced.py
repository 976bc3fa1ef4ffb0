"""Whether modules still are as they were when a model was traced, or its layers were measured.

A number that forward reads becomes part of the traced graph: to change it later changes nothing
that runs. Nor is a hook called that was not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_OTHERS = nn.Module, Tensor, type
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_MOST = 64
"""Items of a list, tuple or dictionary that are looked at."""
_MOST_ELEMENTS = 1 << 18
"""Of a tensor that is kept to see that nobody writes to it."""
_GONE = object()


_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Tensors, submodules and hooks."""


class _Kept(NamedTuple):
    tensor: Tensor
    version: int
    values: Tensor


class Change(NamedTuple):
    """What an attribute was, and what it is."""

    place: str
    """Its path in the model."""
    holder: dict[str, Any]
    name: str
    was: Any
    now: Any

    @property
    def told(self) -> str:
        """The change in words."""
        was, now = (" ".join(f"{value!r}".split())[:60] for value in (self.was, self.now))
        if self.was is _GONE:
            return f"{self.place} was not there and is {now}"
        return f"{self.place} was {was} and is {'gone' if self.now is _GONE else now}"


class AsTraced:
    """What modules, and objects that are their attributes, had as attributes of their own."""

    def __init__(self, model: nn.Module) -> None:
        """Take them down as they are now."""
        self._known: list[tuple[str, dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[str, dict[str, Any], str, _Kept]] = []
        self._hooks: list[tuple[str, str, dict[int, Any], int]] = []
        seen: dict[int, None] = {}
        for path, module in model.named_modules():
            own = vars(module)
            self._take(path, own)
            if "forward" not in own:  # somebody may put one there
                self._known.append((path, own, "forward", _GONE))
            for name, value in own.items():
                if name in _OF_MODULES or isinstance(value, _OTHERS) or callable(value):
                    continue
                if hasattr(value, "__dict__") and id(value) not in seen:
                    seen[id(value)] = None
                    self._take(f"{path}.{name}" if path else name, vars(value))
            self._hooks += [(path, name, own[name], len(own[name])) for name in _HOOKS]

    def _take(self, path: str, own: dict[str, Any]) -> None:
        for name, value in own.items():
            if name in _OF_MODULES:
                continue
            if isinstance(value, Tensor):
                if not (value.is_meta or value.is_inference() or value.numel() > _MOST_ELEMENTS):
                    kept = _Kept(value, value._version, value.detach().clone())
                    self._tensors.append((path, own, name, kept))
            elif type(value) not in (list, tuple, dict):
                self._known.append((path, own, name, value))
            elif len(value) <= _MOST:
                self._known.append((path, own, name, type(value)(value)))

    def changes(self) -> list[Change]:
        """Return what is otherwise now."""
        found = []
        for path, holder, name, was in self._known:
            now = holder.get(name, _GONE)
            if now is not was and not _alike(now, was):
                found.append(Change(f"{path}.{name}" if path else name, holder, name, was, now))
        for path, holder, name, kept in self._tensors:
            now = holder.get(name, _GONE)
            if now is not kept.tensor or now._version != kept.version:
                place = f"{path}.{name}" if path else name
                found.append(Change(place, holder, name, kept.values, now))
        return found

    def other_hooks(self) -> str | None:
        """Return the path of a module that has other hooks now; `None` if there is none."""
        for path, name, hooks, count in self._hooks:
            if len(hooks) != count:
                return f"{path}.{name}" if path else name
        return None


def _alike(now: Any, was: Any) -> bool:
    """Return whether plain values are equal, and others the same objects."""
    if now is was:
        return True
    if type(now) is not type(was):
        return isinstance(now, _PLAIN) and isinstance(was, _PLAIN) and bool(now == was)
    if isinstance(was, dict):
        return now.keys() == was.keys() and all(_alike(now[key], was[key]) for key in was)
    if isinstance(was, list | tuple):
        return len(now) == len(was) and all(map(_alike, now, was))
    return isinstance(was, _PLAIN) and bool(now == was)


@contextmanager
def undone(changes: list[Change]) -> Iterator[None]:
    """Have attributes as they were."""
    for change in changes:
        if change.was is _GONE:
            del change.holder[change.name]
        else:
            change.holder[change.name] = change.was
    try:
        yield
    finally:
        for change in changes:
            if change.now is _GONE:
                del change.holder[change.name]
            else:
                change.holder[change.name] = change.now
