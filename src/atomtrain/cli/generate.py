"""`atom generate`: continue texts with the model of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atomtrain.cli.parsing import check_checkpoint, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import check_counts, check_seed, check_size, check_text, one_of, option

if TYPE_CHECKING:
    from atomtrain.engine.devices.device import Device

_EXAMPLES = """\
  atom generate runs/mine/peer-0 --prompt "In the beginning" --prompt "And then"
  atom generate runs/mine/peer-0/checkpoints/step-00000100 --temperature 0 --tokens 50
  atom generate my-model --precision bf16 --device cuda --device-memory 8GiB"""
_PROMPT = "In the beginning"
_PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What a user can say to `atom generate`."""

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
        "auto (a GPU if there is one, else cpu), cuda, cuda:NUMBER, cpu or emulated[:LINK].",
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
        if not 0 <= self.temperature < 100:
            raise ConfigError(
                f"--temperature must be at least 0 and below 100, not {self.temperature:g}"
            )
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


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        GenerateOptions,
        arguments,
        prog="atom generate",
        about="Continue texts with a trained model, also one that is larger than the device; "
        "prints prompts and continuations, and on standard error the speed.",
        examples=_EXAMPLES,
        positional=("checkpoint",),
    )
    check_checkpoint(options.checkpoint)
    from atomtrain.engine.generation.generating import Wish, generate
    from atomtrain.engine.generation.streaming import gather
    from atomtrain.engine.state.precision import PRECISIONS, Narrowed
    from atomtrain.models.heads import head_of
    from atomtrain.training.setup.state import open_trained

    device = _opened(options)
    try:
        model, tokenizer, context, recipe, _ = open_trained(options.checkpoint)
        if head_of(model) is not None:
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
    number = sum(map(len, found.tokens))
    tokens_text = "1 token" if number == 1 else f"{number} tokens"
    sys.stderr.write(
        f"{tokens_text}, {found.tokens_per_s:.1f} tokens/s, {how} on {device.name}, {precision}\n"
    )
    return 0


def _opened(options: GenerateOptions) -> Device:
    from atomtrain.engine.devices.devices import open_device
    from atomtrain.engine.devices.gpus import gpus

    name = options.device
    if name == "auto" and options.device_memory is None and not gpus():
        name = "cpu"
    return open_device(name, options.device_memory)
