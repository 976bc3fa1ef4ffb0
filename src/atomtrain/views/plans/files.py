"""Files that a command was told to write: refused early, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atomtrain import files
from atomtrain.errors import ConfigError


def require_writable(path: Path | None, flag: str) -> None:
    """Refuse a path that could not be written later, before anything is computed.

    Raises:
        ConfigError: it is a folder, or its folder is missing or may not be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; give the name of a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}; make it, or choose another")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: {folder} may not be written to; choose another folder")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which then becomes `path`, at once or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with files.replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}); choose a file in a folder that you may "
            "write to"
        ) from error
