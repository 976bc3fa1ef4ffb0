"""Locks on open files, between processes; each ends with its file or its process.

Where the system has none (Windows), each function raises what a file system without locks does.
"""

from __future__ import annotations

import errno
import os
from typing import IO

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


def share(file: int | IO[str] | IO[bytes]) -> None:
    """Lock a file as others may too; waits for who has it alone.

    Raises:
        OSError: there are no locks.
    """
    _require_locks()
    fcntl.flock(file, fcntl.LOCK_SH)


def take(file: int | IO[str] | IO[bytes]) -> None:
    """Lock a file alone, without waiting.

    Raises:
        BlockingIOError: another process has it.
        OSError: there are no locks.
    """
    _require_locks()
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def take_for_process(file: int | IO[str] | IO[bytes]) -> None:
    """Do the same with a record lock, which is this process's alone: forks do not inherit it.

    Raises:
        BlockingIOError: another process has it.
        OSError: there are no locks.
    """
    _require_locks()
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _require_locks() -> None:
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
