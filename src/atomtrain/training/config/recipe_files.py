"""Recipe files: a run in one YAML file, whose keys are the options of `atom train`.

Values are read as the option's type wants them, not as YAML guesses: `6e-4` is a number and `no`
a name, as on the command line. Every mistake is told with its line.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import ConfigError, nearest
from atomtrain.settings import TRUTHS, words_of
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.other_names import (
    ADVICE,
    KIND_WORDS,
    KINDS,
    check_not_configuration,
    translated,
)

READY_FOLDER = Path(__file__).parents[2] / "recipes"
SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1 << 20
_GONE = "delay_updates"
"""An option of earlier versions, which recipes may still name."""
_TEXT_MISTAKES = 5
"""A file with so many keys, and no option among them, is something else."""
_OF_OTHERS = {
    "adapter", "base_model", "dataset", "datasets", "finetuning_type", "model_name_or_path",
    "stage", "template",
}  # fmt: skip
"""Keys of axolotl and LLaMA-Factory; two of them are no accident."""
_INSTEAD = {
    "steps": "epochs",
    "epochs": "steps",
    "warmup_steps": "warmup_ratio",
    "warmup_ratio": "warmup_steps",
}
"""What a file says is not meant any more where the command line says the other."""
_OF_NEW_RUNS = ("epochs", "warmup_ratio")
"""What a file says is not meant where the command line resumes or joins: that run has its own."""


class RecipeMistake(NamedTuple):
    """What is wrong in a recipe."""

    line: int | None
    """Counted from 1; `None`: it is not in the file."""
    text: str


class RecipeFile(NamedTuple):
    """What a recipe file says."""

    path: Path
    values: dict[str, Any]
    """By the option's name, in the option's type."""
    lines: dict[str, int]
    """Where each value stands, counted from 1."""
    told: str = ""
    """What names of other tools were taken as, for the user."""


def ready_recipes() -> dict[str, Path]:
    """Return the recipes that come with ATOM, by name."""
    return {path.stem: path for path in sorted(READY_FOLDER.glob("*.yaml"))}


def recipe_path(given: str) -> Path:
    """Return the file that a user means: a path, or the name of a ready recipe.

    Raises:
        ConfigError: there is no such file and no such recipe.
    """
    path, ready = Path(given), ready_recipes()
    if path.is_file():
        return path
    if given in ready:
        return ready[given]
    if path.is_dir():
        raise ConfigError(f"{given} is a folder; give a recipe file, or a text with --data")
    name, equals, value = given.partition("=")
    known = {*typing.get_type_hints(TrainOptions), *KINDS, *ADVICE}
    if equals and name.replace("-", "_") not in known:
        raise ConfigError(
            f"{given!r} stands alone; parts of one value have commas between them and no spaces, "
            "such as r=8,alpha=16"
        )
    if equals:
        raise ConfigError(f"options have dashes: write --{name.replace('_', '-')} {value}")
    if path.suffix in SUFFIXES or len(path.parts) > 1:
        raise ConfigError(f"there is no recipe file {given}; 'atom init' writes one")
    raise ConfigError(
        f"there is no recipe {given!r}.{nearest(given, ready)} Recipes: {', '.join(ready)}, or "
        "the path of a YAML file"
    )


def read_recipe(path: Path) -> RecipeFile:
    """Return what a recipe file says; each value is checked for its type only.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is a recipe of another tool; or all
            mistakes in one line: unknown keys (with the nearest one), values of the wrong type,
            keys given twice.
    """
    hints = typing.get_type_hints(TrainOptions)
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    lines: dict[str, int] = {}
    mistakes: list[RecipeMistake] = []
    seen: set[str] = set()
    for key, node in _entries(path):
        line, name = key.start_mark.line + 1, str(key.value).replace("-", "_")
        seen.add(name)
        try:
            if name == _GONE:
                _check_gone(str(key.value), node)
                continue
            if name in ADVICE:
                raise ConfigError(f"{key.value} is not a key here; {ADVICE[name]}")
            if name not in hints and name not in KINDS:
                names = [known.replace("_", "-") for known in hints]
                raise ConfigError(f"there is no key {key.value!r}.{nearest(str(key.value), names)}")
            if name in lines:
                raise ConfigError(f"{key.value} stands in line {lines[name]} already")
            lines[name] = line
            value = _value(str(key.value), node, hints.get(name) or KINDS[name])
        except ConfigError as error:
            mistakes.append(RecipeMistake(line, str(error)))
            continue
        if value is not None:
            (values if name in hints else others)[name] = value
    check_not_configuration(path, seen)
    if mistakes and len(seen & _OF_OTHERS) > 1:
        raise ConfigError(
            f"{path} is a recipe of axolotl or LLaMA-Factory; 'atom import {path} --out "
            "recipe.yaml' makes one of ATOM"
        )
    if not lines and len(mistakes) >= _TEXT_MISTAKES:
        raise ConfigError(
            f"{path} is not a recipe: no key in it is an option; to train on a text give --data "
            f"{path}"
        )
    try:
        understood = translated(others, values)
    except ConfigError as error:
        line = lines.get(_about(str(error), others) or "", 1)
        raise _as_one(path, [*mistakes, RecipeMistake(line, str(error))]) from error
    if mistakes:
        raise _as_one(path, mistakes)
    lines.update({ours: lines[name] for ours, name in understood.sources.items()})
    return RecipeFile(path, {**values, **understood.values}, lines, understood.line)


def options_with(recipe: RecipeFile, given: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a recipe file, overridden by what was given beside it.

    Args:
        recipe: As it was read.
        given: Options by name, for instance those of the command line.

    Raises:
        ConfigError: has all values that cannot be, with their places in the file.
    """
    begun = given.get("resume") or given.get("join")
    kept = {
        name: value
        for name, value in recipe.values.items()
        if _INSTEAD.get(name) not in given and not (begun and name in _OF_NEW_RUNS)
    }
    values = {**kept, **given}
    mistakes: list[RecipeMistake] = []
    while True:
        try:
            options = TrainOptions(**values)
        except ConfigError as error:
            name = error.field or _about(str(error), values)
            line = None if name in given else recipe.lines.get(name or "")
            mistakes.append(RecipeMistake(line, str(error)))
            if name is None:
                break
            # Without the culprit the next mistake comes to light.
            del values[name]
        else:
            if not mistakes:
                return options
            break
    raise _as_one(recipe.path, mistakes)


def recipe_text(options: TrainOptions) -> str:
    """Return the recipe file that gives these options; only what is not the default is in it."""
    import yaml

    said = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            said[field.name.replace("_", "-")] = _plain(value)
    if not said:
        return "# All options have their defaults.\n"
    text: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _as_one(path: Path, mistakes: Sequence[RecipeMistake]) -> ConfigError:
    """Return all mistakes in one line, each with its place."""
    if len(mistakes) == 1:
        ((line, text),) = mistakes
        return ConfigError(text if line is None else f"{path}:{line}: {text}")
    places = ("elsewhere" if line is None else f"line {line}" for line, _ in mistakes)
    listed = (f"({place}) {text}" for place, (_, text) in zip(places, mistakes, strict=True))
    return ConfigError(f"{path} has {len(mistakes)} mistakes: {' '.join(listed)}")


def _entries(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of keys and values of a file's mapping."""
    import yaml

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is not a recipe: it is larger than 1 MiB")
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8; give a YAML file") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not a recipe; write 'key: value' lines") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(
            f"{path}{where}: not YAML ({reason}); write 'key: value' lines"
        ) from error
    if not text.strip():
        raise ConfigError(f"{path} is empty; write 'key: value' lines, such as 'steps: 100'")
    if root is None:  # comments only
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: a recipe is a list of 'key: value' lines, such as 'steps: 100'")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be an option's name")
        yield key, value


def _value(key: str, node: Any, hint: Any) -> Any:
    """Return a node's value in the type of its option; `None` says: the default."""
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        items = node.value if node.id == "sequence" else [node]
        return tuple(_scalar(key, item, kind) for item in items if not _is_null(item))
    if _is_null(node):
        return None
    if isinstance(hint, types.UnionType) and not words_of(hint):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return _scalar(key, node, hint)


def _check_gone(key: str, node: Any) -> None:
    """Pass over `delay-updates` where it asks for what is always done now."""
    if not _is_null(node) and _scalar(key, node, bool):
        raise ConfigError(
            f"{key}: updates are never one step late any more; leave it out to train exactly"
        )


def _is_null(node: Any) -> bool:
    return bool(node.id == "scalar" and node.tag == "tag:yaml.org,2002:null")


def _scalar(key: str, node: Any, kind: type) -> Any:
    if node.id != "scalar":
        raise ConfigError(f"{key} takes one value, not a {node.id}")
    text, words = node.value.strip(), words_of(kind)
    try:
        if kind is bool:
            return TRUTHS[text.lower()]
        if words:
            return words[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        wanted = ", ".join(words) or KIND_WORDS.get(kind, "a text")
        raise ConfigError(f"{key} must be {wanted}, not {text!r}") from error


def _about(message: str, values: Mapping[str, Any]) -> str | None:
    """Return the option that a message is about: the first that it names and that was given."""
    flags: list[str] = re.findall(r"--([a-z][a-z0-9-]*)", message)
    names = (flag.replace("-", "_") for flag in flags)
    return next((name for name in names if name in values), None)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
