"""What runs are made of: `atom data` shows data, `atom import` and `atom schema` serve recipes."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atomtrain.cli.parsing import complain, parse
from atomtrain.errors import ConfigError, nearest
from atomtrain.files import require_writable
from atomtrain.settings import check_counts, option, words_of
from atomtrain.training.config.imported import imported
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import check_model_name, check_model_place
from atomtrain.training.config.recipe_files import recipe_text

_DATA_EXAMPLES = """\
  atom data inspect chats.jsonl --model models/smollm2-135m
  atom data inspect 'train/*.parquet' --model models/smollm2-135m --context 512 --packing
  atom data inspect 'books/*.txt' --model tiny
  atom data inspect 'stream:org/name:train[:1000]' --model models/smollm2-135m"""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
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


def run_data(arguments: Sequence[str]) -> int:
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
        examples=_DATA_EXAMPLES,
        positional=("data",),
    )
    check_model_name(options.model)
    check_model_place(options.model)
    from atomtrain.training.tools.preview import inspect

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


_IMPORT_EXAMPLES = """\
  atom import qlora.yml                    prints the recipe
  atom import qlora.yml --out recipe.yaml  then: atom train recipe.yaml"""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    file: Path = option(None, "YAML file of axolotl or LLaMA-Factory.", "FILE")
    out: Path | None = option(None, "File to write. Default: standard output.", "FILE")


def run_import(arguments: Sequence[str]) -> int:
    options = parse(
        ImportOptions,
        arguments,
        prog="atom import",
        about="Read a recipe of axolotl or LLaMA-Factory, and write what it says as a recipe of "
        "ATOM. What has no counterpart is listed.",
        examples=_IMPORT_EXAMPLES,
        positional=("file",),
    )
    require_writable(options.out, "--out")
    if options.out is not None and options.out.exists():
        raise ConfigError(f"{options.out} is already there; choose another --out, or remove it")
    try:
        found = imported(options.file)
        text = recipe_text(TrainOptions(**found.values))
    except ConfigError as error:
        if str(options.file) in str(error):
            raise
        raise ConfigError(f"{options.file}: {error}") from error
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


DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SCHEMA_EXAMPLES = """\
  atom schema > atom.schema.json
  # then, at the top of a recipe, for editors that know the YAML language server:
  # yaml-language-server: $schema=atom.schema.json"""
_TYPES = {bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """Nothing but --help."""


def run_schema(arguments: Sequence[str]) -> int:
    parse(
        SchemaOptions,
        arguments,
        prog="atom schema",
        about="Print the JSON schema of recipe files, so that editors complete and check them.",
        examples=_SCHEMA_EXAMPLES,
    )
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    return 0


def schema() -> dict[str, Any]:
    hints = typing.get_type_hints(TrainOptions)
    return {
        "$schema": DRAFT,
        "title": "Recipe of atomtrain",
        "description": "Keys are the options of 'atom train', without the leading dashes.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.name.replace("_", "-"): _property(field, hints[field.name])
            for field in dataclasses.fields(TrainOptions)
        },
    }


def _property(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"description": field.metadata["help"]}
    if typing.get_origin(hint) is tuple:
        item = {"type": _type(typing.get_args(hint)[0])}
        return {**about, "anyOf": [item, {"type": "array", "items": item}, {"type": "null"}]}
    if words := words_of(hint):
        # To an editor `on` is a text; `true` is none.
        about["enum"] = [True, False, *(w for w in words if w not in ("true", "false")), None]
        return {**about, "default": field.default}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    about["type"] = [*(_type(kind) for kind in kinds if kind is not types.NoneType), "null"]
    if field.default is not None:
        about["default"] = field.default if type(field.default) in _TYPES else str(field.default)
    return about


def _type(kind: Any) -> str:
    return _TYPES.get(kind, "string")
