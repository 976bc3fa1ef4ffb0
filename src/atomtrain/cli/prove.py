"""`atom prove`: the bits of ordinary training, through a small device memory, before your eyes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.settings import check_size, option

if TYPE_CHECKING:
    from atomtrain.training.tools.proof import Proof

_EXAMPLES = """\
  atom prove                             the first GPU, or an emulated device
  atom prove --device cuda --steps 20
  atom prove --device-memory 24MiB       less than a quarter of what training holds"""
_STEPS_MAX = 1000
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ProveOptions:
    """What a user can say to `atom prove`."""

    steps: int = option(5, "Optimizer steps of each way.", "N")
    device: str = option("auto", "auto, cuda, cuda:1, cpu or emulated[:RATE].", "NAME")
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

        if not 1 <= self.steps <= _STEPS_MAX:
            raise ConfigError(f"--steps must be 1 to {_STEPS_MAX}, not {self.steps}")
        parse_device(self.device)
        if self.device_memory is not None:
            check_size("--device-memory", self.device_memory)


def run(arguments: Sequence[str]) -> int:
    """Run the command; return 0 if every bit is the same, else 1."""
    options = parse(
        ProveOptions,
        arguments,
        prog="atom prove",
        about="Train a small model twice on the same tokens: swapped through a device memory that "
        "holds a quarter of its training state, and whole in an ordinary PyTorch loop. Compare "
        "every loss and every parameter, bit for bit.",
        examples=_EXAMPLES,
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
    """Return what was found, for people."""
    from atomtrain.units import format_bytes

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
