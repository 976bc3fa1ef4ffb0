"""Writes the table of `docs/metrics.md`: `python -m atombench.pages.metrics_page`."""

from __future__ import annotations

from atombench.pages.writing import DOCS, with_part, write_page
from atomtrain.metrics.names import table

PAGE = DOCS / "metrics.md"
START = "<!-- table, written by python -m atombench.pages.metrics_page -->\n"
END = "<!-- end of table -->\n"


def with_table(page: str) -> str:
    """Return a page with its table replaced by the present one."""
    return with_part(page, START, END, table())


if __name__ == "__main__":
    write_page(PAGE, with_table(PAGE.read_text(encoding="utf-8")))
