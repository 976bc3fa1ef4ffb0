"""What may be wrong: `atom doctor` asks the machine; `atom prove` computes; `atom report` packs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import leaving_at_once, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import check_ip4, check_port, check_size, option
from atomtrain.units import format_bytes

if TYPE_CHECKING:
    from atomtrain.training.tools.proof import Proof


_DOCTOR_EXAMPLES = """\
  atom doctor
  atom doctor --directory /data/runs --port 4001 --json"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    directory: Path = option(Path("runs"), "Folder that runs will be written to.", "FOLDER")
    host: str = option("0.0.0.0", "IPv4 address to listen on for other peers.", "IP")
    port: int = option(0, "TCP port to listen on; 0 is any free one.", "N")
    json: bool = option(False, "Print exactly one JSON object instead of lines.")

    share: bool = option(
        False, "Print what can be shown to strangers: no addresses, paths and names."
    )

    def __post_init__(self) -> None:
        check_port("--port", self.port)
        check_ip4("--host", self.host)


def run_doctor(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if there is a problem, else 0."""
    options = parse(
        DoctorOptions,
        arguments,
        prog="atom doctor",
        about="Check versions, GPU, memory, disk, ports and clock; say what to change.",
        examples=_DOCTOR_EXAMPLES,
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


_PROVE_EXAMPLES = """\
  atom prove                             the first GPU, or an emulated device
  atom prove --device cuda --steps 20
  atom prove --device-memory 24MiB       less than a quarter of what training holds"""
_MOST_STEPS = 1000
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    steps: int = option(5, "Optimizer steps of each way.", "N")
    device: str = option("auto", "auto, cuda, cuda:1, xpu, cpu or emulated[:RATE].", "NAME")
    device_memory: str | None = option(
        None, "What the swapped model may use. Default: a quarter of its training state.", "SIZE"
    )
    json: bool = option(False, "Print exactly one JSON object instead of the table.")

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: too few steps or too many for what is only a proof, or not a device.
        """
        from atomtrain.engine.devices.device_names import parse_device

        if not 1 <= self.steps <= _MOST_STEPS:
            raise ConfigError(f"--steps must be 1 to {_MOST_STEPS}, not {self.steps}")
        parse_device(self.device)
        if self.device_memory is not None:
            check_size("--device-memory", self.device_memory)


def run_prove(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if every bit is the same, else 1."""
    options = parse(
        ProveOptions,
        arguments,
        prog="atom prove",
        about="Train a small model twice on the same tokens: swapped through a device memory that "
        "holds a quarter of its training state, and whole in an ordinary PyTorch loop. Compare "
        "every loss and every parameter, bit for bit.",
        examples=_PROVE_EXAMPLES,
    )
    from atomtrain.training.tools.proof import prove

    if not options.json:
        sys.stderr.write(f"training {options.steps} steps, twice...\n")
    proof = prove(options.steps, options.device, options.device_memory)
    if options.json:
        sys.stdout.write(json.dumps({**asdict(proof), "equal": proof.equal}) + "\n")
    else:
        sys.stdout.write(table(proof) + "\n")
    return 0 if proof.equal else 1


def table(proof: Proof) -> str:
    lines = [
        f"{proof.parameters:,} parameters; ordinary training holds "
        f"{format_bytes(proof.state_bytes)} on the device",
        f"swapped: {proof.segments} segments through {format_bytes(proof.device_budget_bytes)} of "
        f"{proof.device}, at most {format_bytes(proof.device_peak_bytes)} used",
        "",
        f"{'step':>4}  {'swapped':<20}  {'ordinary':<20}",
    ]
    pairs = zip(proof.swapped_losses, proof.resident_losses, strict=True)
    for number, (ours, theirs) in enumerate(pairs, 1):
        verdict = "" if ours == theirs else "  differs"
        lines.append(f"{number:>4}  {ours!r:<20}  {theirs!r:<20}{verdict}")
    lines += [
        "",
        "SHA-256 of all parameters after the last step:",
        f"  swapped   {proof.swapped_hash}",
        f"  ordinary  {proof.resident_hash}",
        "",
    ]
    if proof.equal:
        lines.append("Equal: every loss and every parameter, bit for bit.")
    else:
        names = ", ".join(proof.differing[:_SHOWN]) or "none"
        lines.append(f"Not equal. Parameters that differ: {len(proof.differing)} ({names}).")
    return "\n".join(lines)


_REPORT_EXAMPLES = """\
  atom report runs/mine                     all peers of a run on this machine
  atom report runs/mine/peer-0 --out a.jsonl"""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    run: Path = option(None, "Folder of a run or of a peer.", "FOLDER")
    out: Path | None = option(None, "File to write. Default: atom-report.jsonl.", "FILE")


def run_report(arguments: Sequence[str]) -> int:
    options = parse(
        ReportOptions,
        arguments,
        prog="atom report",
        about="Pack machine, versions, profiles and events of a run into one file to attach to an "
        "issue: no data, no addresses, no names.",
        examples=_REPORT_EXAMPLES,
        positional=("run",),
    )
    with leaving_at_once():
        from atomtrain.training.run_report import write_report
    out = options.out or Path("atom-report.jsonl")
    n_bytes = write_report(options.run, out)
    sys.stdout.write(f"{out} has {format_bytes(n_bytes)}; look through it before you share it\n")
    return 0
