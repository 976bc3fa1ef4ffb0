"""`atom report`: what a run did, in one file to attach to an issue."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import leaving_at_once, parse
from atomtrain.settings import option
from atomtrain.units import format_bytes

_EXAMPLES = """\
  atom report runs/mine                     all peers of a run on this machine
  atom report runs/mine/peer-0 --out a.jsonl"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a user can say to `atom report`."""

    run: Path = option(None, "Folder of a run or of a peer.", "FOLDER")
    out: Path | None = option(None, "File to write. Default: atom-report.jsonl.", "FILE")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        ReportOptions,
        arguments,
        prog="atom report",
        about="Pack machine, versions, profiles and events of a run into one file to attach to an "
        "issue: no data, no addresses, no names.",
        examples=_EXAMPLES,
        positional=("run",),
    )
    with leaving_at_once():
        from atomtrain.training.run_report import write_report
    out = options.out or Path("atom-report.jsonl")
    n_bytes = write_report(options.run, out)
    sys.stdout.write(f"{out} has {format_bytes(n_bytes)}; look through it before you share it\n")
    return 0
