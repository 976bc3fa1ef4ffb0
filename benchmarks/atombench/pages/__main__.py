"""Fills the tables of the pages in `docs/`; what is between them is written by people.

A table stands between the lines `<!-- table NAME -->` and `<!-- end -->`. Results are those in
`benchmarks/results`. `commands.md` is not kept: it is written as a whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from atombench.pages import code_tables, network_tables, plan_tables, simulation_tables
from atomtrain.errors import AtomError, ConfigError, nearest
from atomtrain.metrics import names

DOCS = Path(__file__).parents[3] / "docs"
COMMANDS = "commands"
_BLOCK = re.compile(
    r"(?<=^<!-- table )(\S+) -->\n(.*?)^(?=<!-- end -->$)", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"^<!-- (table \S+|end) -->$", re.MULTILINE)


def tables() -> dict[str, Callable[[], str]]:
    """Return what makes each table, by name; a result of `network` has the name of its file."""
    network = {
        name: partial(network_tables.network_rows, result)
        for name, result in network_tables.networks().items()
    }
    return {
        "metrics": names.table,
        **code_tables.TABLES,
        **plan_tables.TABLES,
        **network_tables.TABLES,
        **simulation_tables.TABLES,
        **network,
    }


def filled(page: str, made: dict[str, Callable[[], str]]) -> str:
    """Return a page with its tables as they are now.

    Raises:
        ConfigError: a mark has no counterpart, or names a table that does not exist.
    """
    kinds = [mark.split()[0] for mark in _MARK.findall(page)]
    if kinds != ["table", "end"] * (len(kinds) // 2):
        raise ConfigError("each <!-- table NAME --> needs an <!-- end --> before the next one")

    def block(found: re.Match[str]) -> str:
        name = found[1]
        if name not in made:
            raise ConfigError(
                f"there is no table {name!r}.{nearest(name, made)} Tables: {', '.join(made)}"
            )
        return f"{name} -->\n{made[name]()}"

    return _BLOCK.sub(block, page)


def main(arguments: Sequence[str]) -> int:
    """Write the pages that are named, such as `scale`; without a name all of them."""
    paths = [path for path in sorted(DOCS.glob("*.md")) if path.stem != COMMANDS]
    known = [COMMANDS, *(path.stem for path in paths)]
    try:
        for name in arguments or known:
            stem = name.removesuffix(".md")
            if stem not in known:
                raise ConfigError(f"there is no page {name!r} in docs.{nearest(stem, known)}")
            path = DOCS / f"{stem}.md"
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            text = code_tables.commands() if stem == COMMANDS else filled(before, tables())
            if text != before:
                path.write_text(text, encoding="utf-8")
                sys.stdout.write(f"{path}\n")
    except AtomError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
