"""A folder for the sockets of one process, which the next process removes if its owner was killed.

Whoever has a folder holds a lock on a file in it. The kernel frees the lock when the owner ends,
however it ends; so a folder whose lock is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "atom-swarm-"
_LOCK = "lock"
_PATH_BYTES_MAX = 60
"""Paths of sockets may have 107 bytes; names in the folder take the rest."""
_UNLOCKED_S = 60.0
"""A folder without a lock is being made; after this long it was not finished."""


class RuntimeFolder:
    """A new folder, readable by its owner only, held until `close` or the end of the process."""

    def __init__(self) -> None:
        """Make and lock a folder; remove those that nobody holds any more."""
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > _PATH_BYTES_MAX:
            base = Path("/tmp")  # where sockets' paths are short enough
        _remove_forgotten(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        locked = self.path / f".{_LOCK}"
        self._lock = os.open(locked, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_forgotten(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            if folder.stat().st_uid == os.getuid() and _is_forgotten(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_forgotten(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # it is being made, half removed, or somebody else's
        ours = all(entry.is_socket() or entry.name == f".{_LOCK}" for entry in folder.iterdir())
        return ours and time.time() - folder.stat().st_mtime > _UNLOCKED_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)
