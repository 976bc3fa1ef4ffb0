"""What is done with a trained model: `atom evaluate`, `atom export` and `atom generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import check_checkpoint, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import (
    check_counts,
    check_seed,
    check_size,
    check_text,
    number,
    one_of,
    option,
)
from atomtrain.units import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from atomtrain.checkpoint import Checkpoint
    from atomtrain.engine.devices.device import Device


_EVALUATE_EXAMPLES = """\
  atom evaluate runs/mine/peer-0
  atom evaluate runs/mine/peer-0 --data chats.jsonl --json
  atom evaluate my-model --data 'books/*.txt' --context 512"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    checkpoint: Path = option(
        None,
        "A checkpoint, or the folder of a peer, of a Hugging Face model or of adapters.",
        "CHECKPOINT",
    )
    data: str | None = option(
        None, "As --data of atom train; its held-out part counts. Default: the run's.", "FILES"
    )
    context: int | None = option(None, "Tokens of a sequence. Default: the run's, or 1024.", "N")
    sequences: int = option(64, "Sequences to evaluate at most.", "N")
    json: bool = option(False, "Print exactly one JSON object.")

    def __post_init__(self) -> None:
        check_counts(self, "context", "sequences")


def run_evaluate(arguments: Sequence[str]) -> int:
    options = parse(
        EvaluateOptions,
        arguments,
        prog="atom evaluate",
        about="Evaluate a trained model on text or answers that were held out.",
        examples=_EVALUATE_EXAMPLES,
        positional=("checkpoint",),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.training.tools.evaluation import (
        ClassEvaluation,
        MatchEvaluation,
        PairEvaluation,
        evaluate,
    )

    found = evaluate(options.checkpoint, options.data, options.context, options.sequences)
    if options.json:
        sys.stdout.write(json.dumps(found._asdict()) + "\n")
    elif isinstance(found, ClassEvaluation):
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a text\n"
            f"accuracy        {found.accuracy:.1%} of {found.texts} texts\n"
        )
    elif isinstance(found, MatchEvaluation):
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a query\n"
            f"accuracy        {found.accuracy:.1%} of {found.queries} queries, among "
            f"{found.among} texts\n"
        )
    elif isinstance(found, PairEvaluation):
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a pair\n"
            f"preferred       {found.reward_accuracy:.1%} of {found.pairs} pairs\n"
        )
        if found.reward_margin is not None:
            sys.stdout.write(f"margin          {found.reward_margin:.4f} nats\n")
    else:
        sys.stdout.write(
            f"loss            {found.loss:.4f} nats a token\n"
            f"perplexity      {found.perplexity:.3f}\n"
            f"bits per byte   {found.bits_per_byte:.4f}\n"
            f"targets         {found.targets} tokens in {found.sequences} sequences of "
            f"{found.context}\n"
        )
    return 0


_EXPORT_EXAMPLES = """\
  atom export runs/mine/peer-0 my-model
  atom export runs/mine/peer-0/checkpoints/step-00000100 my-model --dtype bfloat16
  atom export runs/adapted/peer-0 my-adapters                   for peft
  atom export runs/adapted/peer-0 my-model --merge
  atom export runs/mine/peer-0 my-model.gguf --gguf q8_0        for llama.cpp
  atom export runs/mine/peer-0 my-model --push my-name/my-model --dry-run"""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    checkpoint: Path = option(None, "A checkpoint, or the folder of a peer.", "CHECKPOINT")
    target: Path = option(
        None, "Folder to make, or file with --gguf; it must not be there already.", "TARGET"
    )
    dtype: str = option(
        "float32", "float32 (exactly what was trained), bfloat16 or float16.", "TYPE"
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


def run_export(arguments: Sequence[str]) -> int:
    options = parse(
        ExportOptions,
        arguments,
        prog="atom export",
        about="Write a trained model as a folder that Hugging Face's transformers loads, or as a "
        "GGUF file.",
        examples=_EXPORT_EXAMPLES,
        positional=("checkpoint", "target"),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.checkpoint import open_checkpoint
    from atomtrain.training.tools.hub import check_repository, log_in, upload

    if options.push is not None:
        check_repository(options.push)
    checkpoint = open_checkpoint(options.checkpoint)
    if options.dry_run:
        _tell_export(options, checkpoint)
        return 0
    hub = None if options.push is None else log_in()
    _export(options, checkpoint)
    if hub is not None and options.push is not None:
        address = upload(hub, options.push, options.target)
        sys.stdout.write(f"uploaded to {address} (private)\n")
    return 0


def _export(options: ExportOptions, checkpoint: Checkpoint) -> None:
    from atomtrain.training.tools.export import export
    from atomtrain.training.tools.gguf_file import export_gguf

    if options.gguf is not None:
        written = export_gguf(checkpoint, options.target, options.gguf)
        size = format_bytes(written.size_bytes)
        sys.stdout.write(f"{written.file}: {written.tensors} tensors, {size}\n")
        return
    shard_bytes = parse_bytes(options.shard_size, "--shard-size")
    done = export(checkpoint, options.target, options.dtype, shard_bytes, merge=options.merge)
    size, files = format_bytes(done.size_bytes), counted(done.files, "file")
    sys.stdout.write(f"{done.folder}: {done.tensors} tensors, {size} in {files}\n")


def _tell_export(options: ExportOptions, checkpoint: Checkpoint) -> None:
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
        f"{counted(len(files), 'file')}, about {total}; nothing was written or uploaded\n"
    )


_GENERATE_EXAMPLES = """\
  atom generate runs/mine/peer-0 --prompt "In the beginning" --prompt "And then"
  atom generate runs/mine/peer-0/checkpoints/step-00000100 --temperature 0 --tokens 50
  atom generate my-model --precision bf16 --device cuda --device-memory 8GiB"""
_PROMPT = "In the beginning"
_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    checkpoint: Path = option(
        None,
        "A checkpoint, or the folder of a peer, of a Hugging Face model or of adapters.",
        "CHECKPOINT",
    )
    prompt: tuple[str, ...] = option(
        (), f"Text to continue; may be repeated. Default: {_PROMPT}.", "TEXT"
    )
    tokens: int = option(100, "Tokens to append at most.", "N")
    temperature: float = option(0.8, "0 always takes the likeliest token.", "T")
    seed: int = option(0, "Seed of the random choice.", "N")
    device: str = option(
        "auto",
        "auto (a GPU if there is one, else cpu), cuda, cuda:NUMBER, xpu, cpu or emulated[:LINK].",
        "DEVICE",
    )
    device_memory: str | None = option(
        None,
        "Budget of the device, such as 8GiB; what does not fit is loaded for each token. Default: "
        "90% of what the GPU has free.",
        "SIZE",
    )
    precision: str | None = option(
        None, "fp32, bf16 or fp16. Default: the run's, or fp32 for a model's folder.", "NAME"
    )

    def __post_init__(self) -> None:
        from atomtrain.engine.devices.device_names import parse_device

        check_counts(self, "tokens")
        check_seed("--seed", self.seed)
        for prompt in self.prompt:
            check_text("--prompt", prompt)
            if not prompt:
                raise ConfigError("--prompt is empty; give some text, or leave it out")
        warm = number(lambda value: 0 <= value < 100, "at least 0 and below 100", "g")
        warm("--temperature", self.temperature)
        parse_device(self.device)
        if self.device_memory is not None:
            check_size("--device-memory", self.device_memory)
            if self.device == "cpu":
                raise ConfigError(
                    "--device-memory does not limit --device cpu, where the whole model is in "
                    "memory anyway; leave it out, or choose --device emulated"
                )
        if self.precision is not None:
            one_of(_PRECISIONS)("--precision", self.precision)


def run_generate(arguments: Sequence[str]) -> int:
    options = parse(
        GenerateOptions,
        arguments,
        prog="atom generate",
        about="Continue texts with a trained model, also one that is larger than the device; "
        "prints prompts and continuations, and on standard error the speed.",
        examples=_GENERATE_EXAMPLES,
        positional=("checkpoint",),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.engine.generation.generating import Wish, generate
    from atomtrain.engine.generation.streaming import gather
    from atomtrain.engine.state.precision import PRECISIONS, Narrowed
    from atomtrain.models.heads import head_of
    from atomtrain.training.setup.state import open_trained

    device = _opened_device(options)
    try:
        model, tokenizer, context, recipe, sizes = open_trained(options.checkpoint)
        if head_of(model) is not None or getattr(sizes, "embeds", False):
            raise ConfigError(
                f"{options.checkpoint} says something of whole texts and continues none; see "
                "atom evaluate, or give a language model"
            )
        precision = options.precision or ("fp32" if recipe is None else recipe.precision)
        if precision in PRECISIONS:
            Narrowed(model, precision)
        if not device.one_memory:
            gather(model, device)
        prompts = options.prompt or (_PROMPT,)
        ids = [tokenizer.encode(prompt) or [tokenizer.separator] for prompt in prompts]
        wish = Wish(
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
            stop=(tokenizer.separator,),
            context=context,
        )
        found = generate(model, device, ids, wish)
    finally:
        device.close()
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        sys.stdout.write(f"{prompt}{tokenizer.decode(tokens)}\n")
    how = "resident" if found.resident else "streamed"
    tokens_text = counted(sum(map(len, found.tokens)), "token")
    sys.stderr.write(
        f"{tokens_text}, {found.tokens_per_s:.1f} tokens/s, {how} on {device.name}, {precision}\n"
    )
    return 0


def _opened_device(options: GenerateOptions) -> Device:
    from atomtrain.engine.devices.devices import open_device
    from atomtrain.engine.devices.gpus import vendor_here

    name = options.device
    if name == "auto" and options.device_memory is None and vendor_here() is None:
        name = "cpu"
    return open_device(name, options.device_memory)
