"""Pages of `docs/` that are made from code or results: how their generators write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def with_part(page: str, start: str, end: str, part: str) -> str:
    """Return a page in which `part` stands between two marks, instead of what stood there."""
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{part}{end}{after}"


def write_page(path: Path, text: str) -> None:
    """Write a page, and print where it is."""
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}\n")


def print_page_of_result(page: Callable[[Mapping[str, Any]], str]) -> None:
    """Print the page of the result of a benchmark in the file that the first argument names."""
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
