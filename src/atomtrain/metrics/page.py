"""Writes the table of `docs/metrics.md`: `python -m atomtrain.metrics.page`."""

from __future__ import annotations

import sys
from pathlib import Path

from atomtrain.metrics.names import table

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
START = "<!-- table, written by python -m atomtrain.metrics.page -->\n"
END = "<!-- end of table -->\n"


def with_table(page: str) -> str:
    """Return a page with its table replaced by the present one."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{table()}{END}{after}"


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
