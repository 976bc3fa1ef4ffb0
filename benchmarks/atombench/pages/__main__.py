"""Fills what is made of the pages in `docs/`; what is between is written by people.

A part that is made stands between the lines `<!--made:NAME-->` and `<!--end-->`: a table, and
sentences with figures. Results are those in `benchmarks/results`. Pages of `WHOLE` are not
kept: they are written as a whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from atombench.pages import (
    code_tables,
    family_tables,
    network_tables,
    plan_tables,
    simulation_tables,
)
from atomtrain.errors import AtomError, ConfigError, nearest
from atomtrain.metrics import names

DOCS = Path(__file__).parents[3] / "docs"
_BLOCK = re.compile(r"(?<=^<!--made:)(\S+)-->\n(.*?)^(?=<!--end-->$)", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!--(made:\S+|end)-->$", re.MULTILINE)
Parts = Mapping[str, Callable[[], str]]
"""What makes each part, by name."""
WHOLE: Parts = {"commands": code_tables.commands, "families": family_tables.page}
"""What makes each page that is not kept."""


def parts() -> Parts:
    """Return all there are; a result of `network` has the name of its file."""
    network = {
        name: partial(network_tables.network_rows, result)
        for name, result in network_tables.networks().items()
    }
    return {
        "metrics": names.table,
        **code_tables.PARTS,
        **plan_tables.PARTS,
        **family_tables.PARTS,
        **network_tables.PARTS,
        **simulation_tables.PARTS,
        **network,
    }


def filled(page: str, made: Parts) -> str:
    """Return a page with what is made as it is now.

    Raises:
        ConfigError: a mark has no counterpart, or names a part that does not exist.
    """
    kinds = [mark.partition(":")[0] for mark in _MARK.findall(page)]
    if kinds != ["made", "end"] * (len(kinds) // 2):
        raise ConfigError("each <!--made:NAME--> needs an <!--end--> before the next one")

    def block(found: re.Match[str]) -> str:
        name = found[1]
        if name not in made:
            raise ConfigError(
                f"there is no part {name!r}.{nearest(name, made)} Parts: {', '.join(made)}"
            )
        return f"{name}-->\n{made[name]()}"

    return _BLOCK.sub(block, page)


def main(arguments: Sequence[str]) -> int:
    """Write the pages that are named, such as `scale`, or all."""
    paths = [path for path in sorted(DOCS.glob("*.md")) if path.stem not in WHOLE]
    known = [*WHOLE, *(path.stem for path in paths)]
    try:
        for name in arguments or known:
            stem = name.removesuffix(".md")
            if stem not in known:
                raise ConfigError(f"there is no page {name!r} in docs.{nearest(stem, known)}")
            path = DOCS / f"{stem}.md"
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            text = WHOLE[stem]() if stem in WHOLE else filled(before, parts())
            if text != before:
                path.write_text(text, encoding="utf-8")
                sys.stdout.write(f"{path}\n")
    except AtomError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
