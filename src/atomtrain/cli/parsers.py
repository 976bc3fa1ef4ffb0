"""The parsers of all commands, for the page of commands and for completion in shells."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from atomtrain.cli.main import COMMANDS, command_module, is_installed
from atomtrain.cli.parsing import Parser

_WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "swarm": (("status",), ("ping",)),
    "bench": ((), ("report",)),
    "data": (("inspect",),),
}
"""Further words of commands that have some; `()` is the command itself."""


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
    module = command_module(words[0])
    try:
        module.run(list(words[1:]))
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
