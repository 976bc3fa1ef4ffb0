"""`atom export`: a checkpoint as the folder of a Hugging Face model, or as a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import check_checkpoint, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import option
from atomtrain.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from atomtrain.checkpoint import Checkpoint

_EXAMPLES = """\
  atom export runs/mine/peer-0 my-model
  atom export runs/mine/peer-0/checkpoints/step-00000100 my-model --dtype bfloat16
  atom export runs/adapted/peer-0 my-adapters                   for peft
  atom export runs/adapted/peer-0 my-model --merge
  atom export runs/mine/peer-0 my-model.gguf --gguf q8_0        for llama.cpp
  atom export runs/mine/peer-0 my-model --push my-name/my-model --dry-run"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What a user can say to `atom export`."""

    checkpoint: Path = option(None, "A checkpoint, or the folder of a peer.", "CHECKPOINT")
    target: Path = option(
        None, "Folder to make, or file with --gguf; it must not be there already.", "TARGET"
    )
    dtype: str = option(
        "float32",
        "float32 (exactly what was trained), bfloat16 or float16.",
        "TYPE",
    )
    merge: bool = option(
        False, "Of a run with --lora: the whole model with the adapters in it, not these alone."
    )
    gguf: str | None = option(
        None,
        "One GGUF file with matrices in f16, bf16 or q8_0, adapters merged. For llama, mistral, "
        "qwen2 and qwen3.",
        "TYPE",
    )
    shard_size: str = option("5GB", "Size of a file at most.", "SIZE")

    push: str | None = option(
        None, "Upload the export to Hugging Face, into a private repository.", "ORG/NAME"
    )
    dry_run: bool = option(False, "With --push: only say what would be written and uploaded.")

    def __post_init__(self) -> None:
        parse_bytes(self.shard_size, "--shard-size")
        if self.dry_run and self.push is None:
            raise ConfigError("--dry-run says what --push would upload; give --push ORG/NAME too")
        if self.gguf is not None:
            for flag, name in (("--dtype", "dtype"), ("--shard-size", "shard_size")):
                if getattr(self, name) != getattr(type(self), name):
                    raise ConfigError(
                        f"--gguf writes one file in a type of its own; leave out {flag}"
                    )


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        ExportOptions,
        arguments,
        prog="atom export",
        about="Write a trained model as a folder that Hugging Face's transformers loads, or as a "
        "GGUF file.",
        examples=_EXAMPLES,
        positional=("checkpoint", "target"),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.checkpoint import open_checkpoint
    from atomtrain.training.tools.hub import check_repository, log_in, upload

    if options.push is not None:
        check_repository(options.push)
    checkpoint = open_checkpoint(options.checkpoint)
    if options.dry_run:
        _tell_plan(options, checkpoint)
        return 0
    hub = None if options.push is None else log_in()
    _write(options, checkpoint)
    if hub is not None and options.push is not None:
        address = upload(hub, options.push, options.target)
        sys.stdout.write(f"uploaded to {address} (private)\n")
    return 0


def _write(options: ExportOptions, checkpoint: Checkpoint) -> None:
    from atomtrain.training.tools.export import export
    from atomtrain.training.tools.gguf_file import export_gguf

    if options.gguf is not None:
        written = export_gguf(checkpoint, options.target, options.gguf)
        size = format_bytes(written.size_bytes)
        sys.stdout.write(f"{written.file}: {written.tensors} tensors, {size}\n")
        return
    shard_bytes = parse_bytes(options.shard_size, "--shard-size")
    done = export(checkpoint, options.target, options.dtype, shard_bytes, merge=options.merge)
    files = f"{done.files} file{'s' if done.files > 1 else ''}"
    sys.stdout.write(
        f"{done.folder}: {done.tensors} tensors, {format_bytes(done.size_bytes)} in {files}\n"
    )


def _tell_plan(options: ExportOptions, checkpoint: Checkpoint) -> None:
    from atomtrain.training.tools.export import planned
    from atomtrain.training.tools.gguf_file import planned_gguf

    if options.gguf is not None:
        files = planned_gguf(checkpoint, options.target, options.gguf)
    else:
        size = parse_bytes(options.shard_size, "--shard-size")
        files = planned(checkpoint, options.target, options.dtype, size, merge=options.merge)
    sys.stdout.write(f"would be uploaded to {options.push} (private):\n")
    for file in files:
        sys.stdout.write(f"  {file.name}  {format_bytes(file.size_bytes)}\n")
    total = format_bytes(sum(file.size_bytes for file in files))
    sys.stdout.write(
        f"{len(files)} file{'s' if len(files) > 1 else ''}, about {total}; "
        "nothing was written or uploaded\n"
    )
