"""`atom bench report`: one page made of the results of benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.settings import option

_EXAMPLES = """\
  atom bench report
  atom bench report --results my-results --out my-report.html"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a user can say to `atom bench report`."""

    results: Path = option(
        Path("benchmarks/results"), "Folder with what `atom bench NAME --out FILE` wrote.", "DIR"
    )
    out: Path = option(
        Path("report.html"), "The page; a picture of the same name ends in .png.", "FILE"
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        ReportOptions,
        arguments,
        prog="atom bench report",
        about="Write one page, with a picture, of the results in a folder. Nothing is measured.",
        examples=_EXAMPLES,
    )
    from atombench.pages.report_page import write_report

    picture = write_report(options.results, options.out)
    sys.stdout.write(f"{options.out}\n{picture}\n")
    return 0
