"""`atom completion`: completes commands and options in a shell, from all parsers, by `shtab`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from atomtrain.cli.main import COMMANDS, command_module, command_of, is_installed
from atomtrain.cli.parsing import Parser, parse
from atomtrain.errors import ConfigError, nearest
from atomtrain.settings import option

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
  eval "$(atom completion bash)"                 in ~/.bashrc
  eval "$(atom completion zsh)"                  in ~/.zshrc, after compinit
  atom completion fish | source                  in config.fish"""
_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "swarm": (("status",), ("ping",)),
    "bench": ((), ("report",)),
    "data": (("inspect",),),
}
"""Further words of commands that have some; `()` is the command itself."""
_NAMES_OR_FILES = ("train", "plan", "simulate")
"""Commands whose first argument is a known name, or a file or folder."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    shell: str = option(None, f"One of {', '.join(SHELLS)}.", "SHELL")

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            raise ConfigError(
                f"there is no completion for {self.shell!r}.{nearest(self.shell, SHELLS)} "
                f"Shells: {', '.join(SHELLS)}"
            )


def run(arguments: Sequence[str]) -> int:
    options = parse(
        CompletionOptions,
        arguments,
        prog="atom completion",
        about="Print what completes commands and options in a shell.",
        examples=_EXAMPLES,
        positional=("shell",),
    )
    import shtab

    sys.stdout.write(shtab.complete(whole_parser(), options.shell) + "\n")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser of all commands, whose arguments tell `shtab` what to offer for them."""
    import shtab

    names = known_names()
    whole = argparse.ArgumentParser("atom")
    commands = whole.add_subparsers()
    nested: dict[str, Any] = {}
    for words, parser in all_parsers().items():
        for action in options_of(parser):
            given = () if action.option_strings else names.get(words, ())
            if given and words not in _NAMES_OR_FILES:
                action.choices = given
            elif action.nargs != 0:
                offered = _names_or_files(words, given) if given else shtab.FILE
                action.complete = offered  # type: ignore[attr-defined]
        command, _, below = words.partition(" ")
        if below and command not in nested:
            if command not in commands.choices:
                commands.add_parser(command, help=COMMANDS[command])
            nested[command] = commands.choices[command].add_subparsers()
        where = nested[command] if below else commands
        about = (parser.description or "") if below else COMMANDS[command]
        where.add_parser(below or command, help=about, parents=[parser], add_help=False)
    return whole


def known_names() -> dict[str, tuple[str, ...]]:
    """Return the names that may follow a command."""
    from atomtrain.models.gpt_config import PRESETS
    from atomtrain.training.config.recipe_files import ready_recipes

    names: dict[str, tuple[str, ...]] = {
        "train": tuple(ready_recipes()),
        "plan": tuple(PRESETS),
        "simulate": tuple(PRESETS),
        "completion": SHELLS,
    }
    if is_installed("bench"):
        names["bench"] = ("report", *command_module("bench").REGISTRY)
    return names


def _names_or_files(command: str, names: Iterable[str]) -> dict[str, Any]:
    """Return what `shtab` takes of an argument that is one of some names, or a file."""
    words, function = " ".join(names), f"_atom_file_or_{command}"
    bash = f'{function}() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}'
    zsh = f"{function}() {{ compadd -- {words}; _files; }}"
    return {
        "bash": function,
        "zsh": function,
        "fish": f"{words} (__fish_complete_path (commandline -ct))",
        "preamble": {"bash": bash, "zsh": zsh},
    }


class _Captured(Exception):  # noqa: N818 - carries a parser out of a command
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        super().__init__()


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its words, such as `"train"` or `"swarm status"`."""
    found: dict[str, argparse.ArgumentParser] = {}
    with _captured():
        for name in filter(is_installed, COMMANDS):
            for rest in _WORDS.get(name, ((),)):
                found[" ".join((name, *rest))] = _parser_of((name, *rest))
    return found


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield what a user may give: positional arguments first, then options in their order."""
    told = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    yield from (action for action in told if not action.option_strings)
    yield from (action for action in told if action.option_strings)


def _parser_of(words: Sequence[str]) -> argparse.ArgumentParser:
    try:
        command_of(words[0])(list(words[1:]))
    except _Captured as captured:
        return captured.parser
    raise AssertionError(f"atom {' '.join(words)} has no parser")


@contextmanager
def _captured() -> Iterator[None]:
    """Let every parser end its command by handing itself out."""

    def hand_out(self: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        raise _Captured(self)

    before = Parser.parse_args
    Parser.parse_args = hand_out  # type: ignore[method-assign]
    try:
        yield
    finally:
        Parser.parse_args = before  # type: ignore[method-assign]
