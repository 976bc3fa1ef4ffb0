"""Tables and figures of `docs/`, from code and results: `python -m atombench.pages [PAGE...]`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [_row(head), f"|{'---|' * len(head)}", *map(_row, rows)]
    return "".join(f"{line}\n" for line in lines)


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
