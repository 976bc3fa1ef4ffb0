"""`atom import`: turns a recipe of axolotl or LLaMA-Factory into one of ATOM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import complain, parse
from atomtrain.errors import ConfigError
from atomtrain.settings import option
from atomtrain.training.config.imported import imported
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe_files import recipe_text

_EXAMPLES = """\
  atom import qlora.yml                    prints the recipe
  atom import qlora.yml --out recipe.yaml  then: atom train recipe.yaml"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What a user can say to `atom import`."""

    file: Path = option(None, "YAML file of axolotl or LLaMA-Factory.", "FILE")
    out: Path | None = option(None, "File to write. Default: standard output.", "FILE")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        ImportOptions,
        arguments,
        prog="atom import",
        about="Read a recipe of axolotl or LLaMA-Factory, and write what it says as a recipe of "
        "ATOM. What has no counterpart is listed.",
        examples=_EXAMPLES,
        positional=("file",),
    )
    if options.out is not None and options.out.exists():
        raise ConfigError(f"{options.out} is already there; choose another --out, or remove it")
    found = imported(options.file)
    text = recipe_text(TrainOptions(**found.values))
    for line in found.left_out:
        complain(f"left out: {line}")
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{options.out} cannot be written ({error.strerror}); choose another --out"
        ) from error
    sys.stdout.write(f"wrote {options.out}; start with: atom train {options.out}\n")
    return 0
