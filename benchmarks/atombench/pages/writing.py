"""Pages of `docs/` that are made from code or results: how their generators write them."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def with_part(page: str, start: str, end: str, part: str) -> str:
    """Return a page in which `part` stands between two marks, instead of what stood there."""
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{part}{end}{after}"


def write_page(path: Path, text: str) -> None:
    """Write a page, and print where it is."""
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}\n")
