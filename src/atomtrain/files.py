"""Files that are replaced at once or not at all, and the folder of those that can be made again."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atomtrain.errors import ConfigError

SMALL_BYTES = 16 << 20
_BLOBS = "blobs"
"""Where the cache of Hugging Face keeps what `snapshots/REVISION` links to."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which then becomes `path`; nothing is left if that fails.

    It lies beside `path`, ends in `.tmp-` and a name that no other writer has. Raises what writing
    and renaming raise.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_named(path: Path) -> Iterator[Path]:
    """Do the same for a file that a user has named.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}); choose a file in a folder that you may "
            "write to"
        ) from error


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


def read_small(file: Path, most_bytes: int = SMALL_BYTES) -> str:
    """Return the text of a file of a folder that may be a stranger's.

    A link may lead to a file of the same folder, or of the same model in a hub's cache. Else what
    such a folder makes known (texts travel with a run) might be a file of this machine.

    Raises:
        FileNotFoundError: no such file.
        OSError: it cannot be read.
        ValueError: it leads elsewhere, is larger than `most_bytes`, or is not UTF-8.
    """
    if not file.is_file():  # pipes and devices: who reads them may wait for ever
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    folder, found = file.parent.resolve(), file.resolve()
    if not any(found.is_relative_to(place) for place in (folder, folder.parents[1] / _BLOBS)):
        raise ValueError(f"it leads to {found}, outside of its folder")
    with file.open("rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes >> 20} MiB")
    return content.decode("utf-8")


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def default_cache() -> Path:
    """Return the folder for files that can be made again: `$XDG_CACHE_HOME/atomtrain` or like."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atomtrain"
