"""Packages whose names are imported when they are first used, so that light parts stay light."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def getter(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    Args:
        package: Its full name.
        modules: For each name that the package offers, the module that has it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
