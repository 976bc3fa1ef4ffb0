"""The compiled core for other processors than this one: an installation has only its own."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
from functools import cache
from pathlib import Path

from atomtrain.native import build


@cache
def core_for(level: str) -> ctypes.CDLL:
    """Return the core that is built for processors of this level; built once per process."""
    folder = Path(tempfile.mkdtemp(prefix="core-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (path,) = build.build(folder, only=[level])
    return ctypes.CDLL(str(path))
