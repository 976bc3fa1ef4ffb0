"""`atom schema`: the JSON schema of recipe files, made from the options of `atom train`."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atomtrain.cli.parsing import parse
from atomtrain.training.config.options import TrainOptions

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_EXAMPLES = """\
  atom schema > atom.schema.json
  # then, at the top of a recipe, for editors that know the YAML language server:
  # yaml-language-server: $schema=atom.schema.json"""
_TYPES = {bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """What a user can say to `atom schema`."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parse(
        SchemaOptions,
        arguments,
        prog="atom schema",
        about="Print the JSON schema of recipe files, so that editors complete and check them.",
        examples=_EXAMPLES,
    )
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    return 0


def schema() -> dict[str, Any]:
    """Return the schema of recipe files."""
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
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    about["type"] = [*(_type(kind) for kind in kinds if kind is not types.NoneType), "null"]
    if field.default is not None:
        about["default"] = field.default if type(field.default) in _TYPES else str(field.default)
    return about


def _type(kind: Any) -> str:
    return _TYPES.get(kind, "string")
