"""`atom export`: a checkpoint as the folder of a Hugging Face model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.settings import option
from atomtrain.units import format_bytes, parse_bytes

_EXAMPLES = """\
  atom export runs/mine/peer-0 my-model
  atom export runs/mine/peer-0/checkpoints/step-00000100 my-model --dtype bfloat16
  atom export runs/adapted/peer-0 my-adapters                   for peft
  atom export runs/adapted/peer-0 my-model --merge"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a user can say to `atom export`."""

    checkpoint: Path = option(None, "A checkpoint, or the folder of a peer.", "CHECKPOINT")
    folder: Path = option(None, "Folder to make; it must not be there already.", "FOLDER")
    dtype: str = option(
        "float32",
        "float32 (exactly what was trained), bfloat16 or float16.",
        "TYPE",
    )
    merge: bool = option(
        False, "Of a run with --lora: the whole model with the adapters in it, not these alone."
    )
    shard_size: str = option("5GB", "Size of a file at most.", "SIZE")

    def __post_init__(self) -> None:
        parse_bytes(self.shard_size, "--shard-size")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        ExportOptions,
        arguments,
        prog="atom export",
        about="Write a trained model as a folder that Hugging Face's transformers loads.",
        examples=_EXAMPLES,
        positional=("checkpoint", "folder"),
    )
    from atomtrain.checkpoint import open_checkpoint
    from atomtrain.training.tools.export import export

    shard_bytes = parse_bytes(options.shard_size, "--shard-size")
    checkpoint = open_checkpoint(options.checkpoint)
    done = export(checkpoint, options.folder, options.dtype, shard_bytes, merge=options.merge)
    files = f"{done.files} file{'s' if done.files > 1 else ''}"
    sys.stdout.write(
        f"{done.folder}: {done.tensors} tensors, {format_bytes(done.size_bytes)} in {files}\n"
    )
    return 0
