"""Stands for a machine that lacks packages: those that `ATOM_TEST_LACKS` names cannot be imported.

Python imports this by itself where the folder is on `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LACKS = frozenset(os.environ.get("ATOM_TEST_LACKS", "").split(","))


class _Lacking(MetaPathFinder):
    """Finds nothing of what is lacking, and says so before anybody else is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in _LACKS:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


sys.meta_path.insert(0, _Lacking())
