"""`atom completion`: completes commands and options in bash, zsh and fish, from all parsers."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from atomtrain.cli.main import COMMANDS, command_module, command_of, is_installed
from atomtrain.cli.parsing import Parser, parse
from atomtrain.errors import ConfigError, nearest
from atomtrain.settings import option

SHELLS = ("bash", "zsh", "fish")
_ABOUT_CHARACTERS = 72
_EXAMPLES = """\
  eval "$(atom completion bash)"                 in ~/.bashrc
  eval "$(atom completion zsh)"                  in ~/.zshrc, after compinit
  atom completion fish | source                  in config.fish"""
_BASH = """\
_atom() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" given="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$given ${{COMP_WORDS[2]}}" in
            {nested}) given="$given ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    case "$COMP_CWORD:$word" in
        1:*) words="{commands}" ;;
        *:-*) case "$given" in
{options}
        esac ;;
        2:*) case "$given" in
{names}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _atom atom
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "swarm": (("status",), ("ping",)),
    "bench": ((), ("report",)),
    "data": (("inspect",),),
}
"""Further words of commands that have some; `()` is the command itself."""


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
    flags = {
        words: [action for action in options_of(parser) if action.option_strings]
        for words, parser in all_parsers().items()
    }
    make = _fish if options.shell == "fish" else _bash
    text = make(flags)
    sys.stdout.write(_ZSH + text if options.shell == "zsh" else text)
    return 0


def names_after(commands: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return what may follow a command: the words of commands that have some, and known names.

    Where nothing is known, or nothing that is known fits, shells offer files.
    """
    from atomtrain.models.gpt_config import PRESETS
    from atomtrain.training.config.recipe_files import ready_recipes

    names: dict[str, tuple[str, ...]] = {
        "train": tuple(ready_recipes()),
        "plan": tuple(PRESETS),
        "simulate": tuple(PRESETS),
        "completion": SHELLS,
    }
    if is_installed("bench"):
        names["bench"] = tuple(command_module("bench").REGISTRY)
    for words in commands:
        command, _, below = words.partition(" ")
        if below:
            names[command] = (*names.get(command, ()), below)
    return names


def _bash(flags: Mapping[str, Sequence[argparse.Action]]) -> str:
    def cases(offered: Mapping[str, Iterable[str]]) -> str:
        return "\n".join(
            f'            "{words}") words="{" ".join(some)}" ;;' for words, some in offered.items()
        )

    options = {
        words: [flag for action in actions for flag in action.option_strings]
        for words, actions in flags.items()
    }
    return _BASH.format(
        commands=" ".join(COMMANDS),
        nested="|".join(f'"{words}"' for words in flags if " " in words),
        options=cases(options),
        names=cases(names_after(flags)),
    )


def _fish(flags: Mapping[str, Sequence[argparse.Action]]) -> str:
    lines = ["complete -c atom -e", "complete -c atom -n __fish_use_subcommand -f"]
    for name, about in COMMANDS.items():
        lines.append(f"complete -c atom -n __fish_use_subcommand -a {name} -d {_quoted(about)}")
    for name, offered in names_after(flags).items():
        when = f"__fish_seen_subcommand_from {name}"
        lines.append(f"complete -c atom -n '{when}' -a '{' '.join(offered)}'")
    for words, actions in flags.items():
        when = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words.split())
        for action in actions:
            names = [
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in action.option_strings
            ]
            value = "" if action.nargs == 0 else " -r"
            about = _quoted((action.help or "").replace("%%", "%").partition(". ")[0])
            lines.append(f"complete -c atom -n '{when}' {' '.join(names)}{value} -d {about}")
    return "\n".join((*lines, ""))


def _quoted(text: str) -> str:
    """Return a text as fish reads it, shortened to what fits beside a word."""
    short = textwrap.shorten(text.rstrip("."), _ABOUT_CHARACTERS, placeholder=" ...")
    escaped = short.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


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
