"""The commands that the documentation shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- runs -->\n+)?^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Shown(NamedTuple):
    """A command line in a block of a page."""

    page: str
    runs: bool
    """Whether a test runs the block as it stands; others are too long or need hardware."""
    words: tuple[str, ...]


def shown_commands() -> Iterator[Shown]:
    """Yield every command line that begins with `atom`."""
    for page in PAGES:
        if page.name == "commands.md":  # made from the code
            continue
        for mark, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                words = tuple(shlex.split(line, comments=True))
                if words[:1] == ("atom",):
                    yield Shown(page.name, bool(mark), words[1:])
