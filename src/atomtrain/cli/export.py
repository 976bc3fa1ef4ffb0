"""`atom export`: a checkpoint as the folder of a Hugging Face model, or as a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.settings import option
from atomtrain.units import format_bytes, parse_bytes

_EXAMPLES = """\
  atom export runs/mine/peer-0 my-model
  atom export runs/mine/peer-0/checkpoints/step-00000100 my-model --dtype bfloat16
  atom export runs/adapted/peer-0 my-adapters                   for peft
  atom export runs/adapted/peer-0 my-model --merge
  atom export runs/mine/peer-0 my-model.gguf --gguf q8_0        for llama.cpp"""


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

    def __post_init__(self) -> None:
        parse_bytes(self.shard_size, "--shard-size")
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
    from atomtrain.checkpoint import open_checkpoint
    from atomtrain.training.tools.export import export
    from atomtrain.training.tools.gguf_file import export_gguf

    if options.gguf is not None:
        written = export_gguf(open_checkpoint(options.checkpoint), options.target, options.gguf)
        size = format_bytes(written.size_bytes)
        sys.stdout.write(f"{written.file}: {written.tensors} tensors, {size}\n")
        return 0
    shard_bytes = parse_bytes(options.shard_size, "--shard-size")
    checkpoint = open_checkpoint(options.checkpoint)
    done = export(checkpoint, options.target, options.dtype, shard_bytes, merge=options.merge)
    files = f"{done.files} file{'s' if done.files > 1 else ''}"
    sys.stdout.write(
        f"{done.folder}: {done.tensors} tensors, {format_bytes(done.size_bytes)} in {files}\n"
    )
    return 0
