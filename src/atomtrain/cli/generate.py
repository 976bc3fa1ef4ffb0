"""`atom generate`: continue a text with the model of a checkpoint."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.settings import check_counts, check_seed, check_text, option

_EXAMPLES = """\
  atom generate runs/mine/peer-0 --prompt "In the beginning"
  atom generate runs/mine/peer-0/checkpoints/step-00000100 --temperature 0 --tokens 50"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What a user can say to `atom generate`."""

    checkpoint: Path = option(
        None,
        "A checkpoint, or the folder of a peer, of a Hugging Face model or of adapters.",
        "CHECKPOINT",
    )
    prompt: str = option("In the beginning", "Text to continue.", "TEXT")
    tokens: int = option(100, "Tokens to append at most.", "N")
    temperature: float = option(0.8, "0 always takes the likeliest token.", "T")
    seed: int = option(0, "Seed of the random choice.", "N")

    def __post_init__(self) -> None:
        check_counts(self, "tokens")
        check_seed("--seed", self.seed)
        check_text("--prompt", self.prompt)
        if not 0 <= self.temperature < 100:
            raise ConfigError(
                f"--temperature must be at least 0 and below 100, not {self.temperature:g}"
            )


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        GenerateOptions,
        arguments,
        prog="atom generate",
        about="Continue a text with a trained model; prints prompt and continuation.",
        examples=_EXAMPLES,
        positional=("checkpoint",),
    )
    if not options.checkpoint.is_dir():
        raise CheckpointError(
            f"{options.checkpoint} is not a folder; give a checkpoint or the folder of a run"
        )
    import torch

    from atomtrain.models.sampling import sample
    from atomtrain.training.setup.state import open_trained

    model, tokenizer, context, *_ = open_trained(options.checkpoint)
    generator = torch.Generator().manual_seed(options.seed)
    ids = tokenizer.encode(options.prompt) or [tokenizer.separator]
    tokens = sample(model, torch.tensor(ids), options.temperature, generator, context)
    tokens = itertools.takewhile(lambda token: token != tokenizer.separator, tokens)
    text = tokenizer.decode(list(itertools.islice(tokens, options.tokens)))
    sys.stdout.write(f"{options.prompt}{text}\n")
    return 0
