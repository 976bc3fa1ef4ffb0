"""The commands and the Python that the documentation shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

MADE = ("commands.md", "families.md")
"""Pages that are made of code and results when the site is built."""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE),
]
"""All but those."""
_BLOCK = re.compile(r"(<!-- runs -->\n+)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash")


class Block(NamedTuple):
    """A block of a page between fences."""

    page: str
    language: str
    """As it stands behind the fence; may be empty."""
    marked: bool
    """Whether a comment asks for the block to be run as it stands."""
    text: str

    @property
    def lines(self) -> list[str]:
        """Lines that are not empty; those that a backslash continues are one."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


class Shown(NamedTuple):
    """A command line that begins with `atom`."""

    page: str
    runs: bool
    """Whether a test runs the block as it stands."""
    words: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """Yield all blocks of a page, in order."""
    for mark, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        yield Block(page.name, language, bool(mark), text)


def command_of(line: str) -> tuple[str, ...] | None:
    """Return the words behind `atom` of a line of a shell, `None` if it is another program's."""
    words = tuple(shlex.split(line, comments=True))
    return words[1:] if words[:1] == ("atom",) else None


def shown_commands() -> Iterator[Shown]:
    """Yield every command line that begins with `atom`."""
    for page in PAGES:
        for block in blocks(page):
            for line in block.lines if block.language in SHELLS else ():
                words = command_of(line)
                if words is not None:
                    yield Shown(page.name, block.marked, words)
