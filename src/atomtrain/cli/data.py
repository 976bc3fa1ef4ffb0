"""`atom data inspect`: what a run would learn from, before it is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError, nearest
from atomtrain.settings import check_counts, option

_EXAMPLES = """\
  atom data inspect chats.jsonl --model models/smollm2-135m
  atom data inspect 'train/*.parquet' --model models/smollm2-135m --context 512 --packing
  atom data inspect 'books/*.txt' --model tiny
  atom data inspect 'stream:org/name:train[:1000]' --model models/smollm2-135m"""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What a user can say to `atom data inspect`."""

    data: str = option(None, "As --data of atom train.", "FILES")
    model: str = option(
        None,
        "Folder or id of a Hugging Face model; or a model by name, whose tokenizer is trained on "
        "the text.",
        "NAME",
    )
    context: int = option(1024, "Tokens of a sequence.", "N")
    packing: bool = option(False, "Put several rows into one sequence.", "")
    samples: int = option(1, "Examples to show, with [[answers]] marked.", "N")
    json: bool = option(False, "Print exactly one JSON object.")

    def __post_init__(self) -> None:
        check_counts(self, "context")
        check_counts(self, "samples", least=0)
        if self.model is None:
            raise ConfigError("--model is missing; name the model whose tokenizer is to be used")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    if arguments and arguments[0] == "inspect":
        arguments = arguments[1:]
    elif not arguments:
        raise ConfigError("atom data what? Write: atom data inspect FILES")
    elif arguments[0] not in ("-h", "--help"):
        hint = nearest(arguments[0], ["inspect"])
        raise ConfigError(
            f"atom data has no part {arguments[0]!r}.{hint} Write: atom data inspect FILES"
        )
    options = parse(
        InspectOptions,
        arguments,
        prog="atom data inspect",
        about="Count tokens and answers of training data and show what is learnt.",
        examples=_EXAMPLES,
        positional=("data",),
    )
    from atomtrain.training.tools.inspection import inspect

    found = inspect(
        options.data, options.model, options.context, packed=options.packing,
        samples=options.samples,
    )  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    samples = found.pop("samples")
    for name, value in found.items():
        sys.stdout.write(f"{name.replace('_', ' '):<18}{value}\n")
    longest = found.get("longest_context", options.context)
    if 0 < longest < options.context:
        sys.stdout.write(
            f"\ntoo little text for sequences of {options.context} tokens: "
            f"give --context {longest} or less, or more text\n"
        )
    for number, sample in enumerate(samples):
        sys.stdout.write(f"\nexample {number}:\n{sample}\n")
    return 0
