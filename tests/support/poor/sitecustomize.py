"""Stands for a machine that lacks packages: those that `ATOM_TEST_LACKS` names are not found.

Python imports this by itself where the folder is on `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_LACKS = frozenset(os.environ.get("ATOM_TEST_LACKS", "").split(","))


class _Without:
    """Finds what another finder finds, but for what is lacking."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in _LACKS:
            return None
        return self._finder.find_spec(fullname, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
