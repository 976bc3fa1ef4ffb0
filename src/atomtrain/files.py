"""Files that are replaced at once or not at all, and the folder of those that can be made again."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def default_cache() -> Path:
    """Return the folder for files that can be made again: `$XDG_CACHE_HOME/atomtrain` or like."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "atomtrain"
