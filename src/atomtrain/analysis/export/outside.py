"""What forward could change outside its modules: globals, closures and classes that its code names,
and objects that modules or globals hold.

Only names in code that forward may reach are looked at, so that what other threads do meanwhile
does not count: from the forwards of a model's classes and their hooks along the names of methods
and functions. Code of torch, NumPy and Python itself is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from atomtrain.analysis.export.attributes import HOLDERS, PLAIN, Values, changes_in, kept
from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.errors import AnalysisError

_OTHERS = {"torch", "numpy", "builtins", "atomtrain", *sys.stdlib_module_names} - {"__main__"}
_HOOKS = "_forward_hooks", "_forward_pre_hooks"


@dataclass(frozen=True)
class _Place:
    """Where values are kept, by name."""

    called: str
    look: Callable[[], Mapping[str, Any]]
    put: Callable[[str, Any], None]
    names: set[str] | None
    """Those that are looked at; `None`: all."""

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield what could be a state: no code, and nothing of Python's own."""
        space = self.look()
        for name in list(space) if self.names is None else self.names & space.keys():
            value = space[name]
            if isinstance(value, (*PLAIN, *HOLDERS, Tensor)) and not name.startswith("__"):
                yield name, value


class Outside:
    """What the code of a model's modules could change there, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, _Place] = {}
        self._find(model)
        self._before = {
            key: {name: (value, _copy(value)) for name, value in place.values()}
            for key, place in self._places.items()
        }
        self._was = self.values()

    def values(self) -> Values:
        """Return what is there now; see `changes_in`."""
        return {
            key: {name: kept(value) for name, value in place.values()}
            for key, place in self._places.items()
        }

    def changes(self) -> list[tuple[str, str]]:
        """Return keys of places, and names, of what is another value than at first."""
        return changes_in(self._was, self.values())

    def holds_tensors(self) -> bool:
        """Return whether something that has changed is a tensor, or holds some."""
        return any(
            _has_tensor(dict(self._places[key].values()).get(name)) for key, name in self.changes()
        )

    def refuse(self) -> None:
        """Raise `AnalysisError` if something has changed, which is put back: it may be a trace's.

        Raises:
            AnalysisError: says what.
        """
        changes = self.changes()
        for key, name in changes:
            place, before = self._places[key], self._before[key]
            value, copy = before.get(name, (None, None))
            if isinstance(value, list):
                value[:] = copy
            elif isinstance(value, dict | set):
                value.clear()
                value.update(copy)
            place.put(name, value)
        for key, name in changes[:1]:
            raise AnalysisError(
                f"forward changes {name!r} of {self._places[key].called}, outside of the model, "
                "which would happen once instead of in every step; keep such a state in a "
                f"registered buffer, {MANUAL}"
            )

    def _find(self, model: nn.Module) -> None:
        # Of layers the loss is a part, which runs by its own code, once a micro-batch.
        modules = [m for m in model.modules() if _root(type(m).__module__) != "atomtrain"]
        kinds = {kind for module in modules for kind in type(module).__mro__ if _is_looked_at(kind)}
        methods: dict[str, list[Any]] = {}
        for module in modules:
            for name, value in vars(module).items():
                self._add_object(f"{name} of a {type(module).__name__}", value)
        for kind in kinds:
            self._add_class(kind)
            for name, value in vars(kind).items():
                methods.setdefault(name, []).append(value)
        begun = [*methods.get("forward", ()), *methods.get("__call__", ()), *_own(modules)]
        waiting = [function for raw in begun for function in _functions_in(raw)]
        seen: dict[int, FunctionType] = {}
        while waiting:
            function = waiting.pop()
            if id(function) in seen or _root(function.__globals__.get("__name__")) in _OTHERS:
                continue
            seen[id(function)] = function
            for value in self._add_function(function, methods):
                waiting.extend(_functions_in(value))

    def _add_function(
        self, function: FunctionType, methods: Mapping[str, list[Any]]
    ) -> Iterator[Any]:
        """Look at what a function's code names, and yield what it could call."""
        space = function.__globals__
        module = f"module {space.get('__name__')}"
        place = _Place(module, lambda: space, space.__setitem__, set())
        place = self._places.setdefault(module, place)
        for name in set(_names_in(function.__code__)):
            assert place.names is not None
            place.names.add(name)
            yield from methods.get(name, ())
            value = space.get(name)
            if isinstance(value, type) and _is_looked_at(value):
                self._add_class(value)
            else:
                self._add_object(f"{name} in {module}", value)
            yield value
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        if cells := {name: cell for name, cell in free if _is_filled(cell)}:
            called = f"the variables of {function.__qualname__}"
            self._places[f"{called} {id(function)}"] = _Place(
                called,
                lambda: {name: cell.cell_contents for name, cell in cells.items()},
                lambda name, value: setattr(cells[name], "cell_contents", value),
                None,
            )
            yield from (cell.cell_contents for cell in cells.values())

    def _add_class(self, kind: type) -> None:
        called = f"class {kind.__module__}.{kind.__qualname__}"
        place = _Place(called, lambda: vars(kind), partial(setattr, kind), None)
        self._places.setdefault(called, place)

    def _add_object(self, called: str, value: Any) -> None:
        if _is_object(value):
            place = _Place(called, lambda: vars(value), partial(setattr, value), None)
            self._places.setdefault(f"object {id(value)}", place)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict | set) else None


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the Python functions that calling a value runs, itself or as a decorator."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property | partial):
        value = value.func
    if isinstance(value, FunctionType):
        yield value
        if (inner := value.__dict__.get("__wrapped__")) is not None:
            yield from _functions_in(inner)


def _own(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield functions that modules have themselves: hooks, and a forward that was put there."""
    for module in modules:
        own = vars(module)
        yield from own.values()
        for hooks in _HOOKS:
            yield from own.get(hooks, {}).values()


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_looked_at(kind: type) -> bool:
    return _root(kind.__module__) not in _OTHERS


def _is_object(value: Any) -> bool:
    """Return whether a value is an object that is neither code, a module nor a tensor."""
    code = FunctionType | ModuleType | type
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | code)
        and _is_looked_at(type(value))
    )


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises where there is nothing yet)
    except ValueError:
        return False
    return True


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | set) and any(isinstance(each, Tensor) for each in value)
    )
