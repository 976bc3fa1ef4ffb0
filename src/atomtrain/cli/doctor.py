"""`atom doctor`: is this machine fit to train, alone and with others?"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atomtrain.cli.parsing import leaving_at_once, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import check_port, option

_EXAMPLES = """\
  atom doctor
  atom doctor --directory /data/runs --port 4001 --json"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What a user can say to `atom doctor`."""

    directory: Path = option(Path("runs"), "Folder that runs will be written to.", "FOLDER")
    host: str = option("0.0.0.0", "IPv4 address to listen on for other peers.", "IP")
    port: int = option(0, "TCP port to listen on; 0 is any free one.", "N")
    json: bool = option(False, "Print exactly one JSON object instead of lines.")

    share: bool = option(
        False, "Print what can be shown to strangers: no addresses, paths and names."
    )

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        try:
            ipaddress.IPv4Address(self.host)
        except ValueError as error:
            raise ConfigError(
                f"--host {self.host!r} is no IPv4 address; give 0.0.0.0 (all) or one of this "
                "machine's"
            ) from error


def run(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if there is a problem, else 0."""
    options = parse(
        DoctorOptions,
        arguments,
        prog="atom doctor",
        about="Check versions, GPU, memory, disk, ports and clock; say what to change.",
        examples=_EXAMPLES,
    )
    with leaving_at_once():
        from atomtrain.training.tools.doctor import PROBLEM, examine

    findings = examine(options.directory, options.host, options.port)
    if options.share:
        from atomtrain.training.run_report import hidden

        findings = [
            replace(one, detail=hidden(one.detail), fix=hidden(one.fix))
            for one in findings
            if one.check != "network"
        ]
    problems = sum(finding.state == PROBLEM for finding in findings)
    if options.json:
        result = {"findings": [asdict(f) for f in findings], "problems": problems}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{finding.state:<8} {finding.check:<11} {finding.detail}\n")
            if finding.fix:
                sys.stdout.write(f"{'':<8} {'':<11} -> {finding.fix}\n")
    return 1 if problems else 0
