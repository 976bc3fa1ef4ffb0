"""Whether modules still are as they were when a model was traced, or its layers were measured.

A number that forward reads becomes part of the traced graph: to change it later changes nothing
that runs. Nor is a hook called that was not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_MOST = 64
"""Items of a list, tuple or dictionary that are looked at."""
_GONE = object()


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
        if self.now is _GONE:
            return f"{self.place} was {self.was!r:.60} and is gone"
        return f"{self.place} was {self.was!r:.60} and is {self.now!r:.60}"


class AsTraced:
    """What modules, and the objects named `config` in them, had as plain attributes."""

    def __init__(self, model: nn.Module) -> None:
        """Take them down as they are now."""
        self._known: list[tuple[str, dict[str, Any], str, Any]] = []
        self._hooks: list[tuple[str, str, dict[int, Any], int]] = []
        configs: dict[int, None] = {}
        for path, module in model.named_modules():
            own = vars(module)
            self._take(path, own)
            config = own.get("config")
            if hasattr(config, "__dict__") and id(config) not in configs:
                configs[id(config)] = None
                self._take(f"{path}.config" if path else "config", vars(config))
            self._hooks += [(path, name, own[name], len(own[name])) for name in _HOOKS]

    def _take(self, path: str, own: dict[str, Any]) -> None:
        for name, value in own.items():
            if isinstance(value, _PLAIN) or _is_short(value):
                kept = type(value)(value) if isinstance(value, list | dict) else value
                self._known.append((path, own, name, kept))

    def changes(self) -> list[Change]:
        """Return what is otherwise now."""
        found = []
        for path, holder, name, was in self._known:
            now = holder.get(name, _GONE)
            if now is not was and now != was:
                found.append(Change(f"{path}.{name}" if path else name, holder, name, was, now))
        return found

    def other_hooks(self) -> str | None:
        """Return the path of a module that has other hooks now; `None` if there is none."""
        for path, name, hooks, count in self._hooks:
            if len(hooks) != count:
                return f"{path}.{name}" if path else name
        return None


def _is_short(value: Any) -> bool:
    if type(value) not in (list, tuple, dict) or len(value) > _MOST:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(isinstance(item, _PLAIN) for item in items)


@contextmanager
def undone(changes: list[Change]) -> Iterator[None]:
    """Have attributes as they were."""
    for change in changes:
        change.holder[change.name] = change.was
    try:
        yield
    finally:
        for change in changes:
            if change.now is _GONE:
                del change.holder[change.name]
            else:
                change.holder[change.name] = change.now
