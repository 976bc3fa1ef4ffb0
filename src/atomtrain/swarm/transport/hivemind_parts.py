"""hivemind's hash table and streams, imported without the rest of hivemind.

`import hivemind` runs a package that imports its averager, its optimizers and its mixture of
experts, and SciPy and pydantic for them: most of what that takes, and nothing of it is used here.
So the package is made known without being run, and the modules that are used are imported as ever.
Who asks the package itself for something gets all of it then.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

_PACKAGE = "hivemind"
_PARTS = ("hivemind.dht.node", "hivemind.dht.validation", "hivemind.utils.multiaddr")


class _NotRunYet(types.ModuleType):
    """A package of which nothing but submodules was asked for so far."""

    def __getattr__(self, name: str) -> Any:
        if (part := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return part  # its import has not ended yet
        if name.startswith("__") and name != "__version__":  # as tools that look at modules do
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        importlib.reload(self)
        return getattr(self, name)


def import_hivemind() -> None:
    """Import what the swarm uses: seconds on a busy machine, so before any deadline runs."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {_PACKAGE!r}", name=_PACKAGE)
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _NotRunYet
        sys.modules[_PACKAGE] = package
    for part in _PARTS:
        importlib.import_module(part)
