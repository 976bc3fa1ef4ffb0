"""Files that are replaced at once or not at all, and the folder of those that can be made again."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def default_cache() -> Path:
    """Return the folder for files that can be made again: `$XDG_CACHE_HOME/atomtrain` or like."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atomtrain"
