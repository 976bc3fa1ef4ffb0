"""Writes the table of docs/scale.md from a result of `atom bench simulation`.

`python -m atombench.pages.scale_page benchmarks/results/simulation.json`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atombench.pages.writing import DOCS, with_part, write_page
from atomtrain.units import format_seconds

START, END = "<!-- scale:start -->\n", "<!-- scale:end -->\n"
PAGE = DOCS / "scale.md"


def table(result: Mapping[str, Any]) -> str:
    """Return the table of swarms of growing size."""
    return "".join(f"{line}\n" for line in _lines(result["scale"]))


def _lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        "| peers | groups | of what all train alone | round | model averaged every | "
        "contributions lost | busiest uplink | drift | simulated in |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [
            f"{row['peers']:,}",
            str(row["group"] or "all"),
            f"{row['share_of_alone']:.1%}",
            format_seconds(row["round_s"]),
            format_seconds(row["averaged_every_s"]),
            f"{row['lost_share']:.2%}",
            f"{row['busiest_up_share']:.0%}",
            f"{row['drift']:.2f}",
            f"{row['took_s']:.1f} s",
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    write_page(PAGE, with_part(PAGE.read_text(encoding="utf-8"), START, END, table(found)))
