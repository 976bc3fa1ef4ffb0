"""What all commands share: options from dataclasses, mistakes in one line, Ctrl-C in imports."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import signal
import sys
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from atomtrain.errors import CheckpointError, ConfigError, nearest
from atomtrain.settings import words_of

Options = TypeVar("Options")
COMPLAINT = "atom: "
_OURS = (
    ("^the following arguments are required: (.*)", r"\1 is missing"),
    ("^argument (.*): expected one argument$", r"\1 needs a value"),
    ("^argument (.*): ignored explicit argument (.*)", r"\1 takes no value, \2 neither"),
    ("^argument ([^:]*): takes ", r"\1 takes "),
    ("^argument (.*): invalid int value: (.*)", r"\1 takes a whole number, not \2"),
    ("^argument (.*): invalid float value: (.*)", r"\1 takes a number, not \2"),
)
"""What argparse says, and what it means to somebody who knows nothing of Python."""
_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_LONGEST_LINE = 4000
"""Characters that are shown of what others may have written."""
_INTERRUPTED = 128 + signal.SIGINT
_LONG_DASHES = re.compile("[\u2010-\u2015\u2212]+")
"""What word processors and web pages make of `-` and `--`."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes as `ConfigError` instead of usage and exit."""

    advice: Mapping[str, str] = types.MappingProxyType({})
    """What to do instead of options of other tools, by their names."""

    def error(self, message: str) -> NoReturn:
        for words, ours in _OURS:
            message = re.sub(words, ours, message)
        hint = ""
        if "unrecognized arguments" in message:
            given = next((a for a in message.split() if a.startswith("-")), "").partition("=")[0]
            instead = self.advice.get(given.lstrip("-").replace("-", "_"))
            if instead is not None:
                raise ConfigError(f"{given} is not an option of {self.prog}; {instead}")
            names = [f.removeprefix("--") for f in self._option_string_actions if f[:2] == "--"]
            hint = nearest(given.lstrip("-"), names).replace("mean '", "mean '--") if given else ""
            if re.fullmatch(r"-\w", given):
                hint = " Options have two dashes and a whole name."
            if not given:
                hint = self._hint_of_words(message, names)
        if found := _LONG_DASHES.search(message):
            hint = f" It has {found[0]!r}, which looks like a minus; type '-'."
        raise ConfigError(f"{message}.{hint} See '{self.prog} --help'")

    def _hint_of_words(self, message: str, names: Sequence[str]) -> str:
        """Return what to do about words without dashes that are too many."""
        pair = re.search(r"(\w+)=(\S+)", message)
        name = pair[1].replace("_", "-") if pair else ""
        if pair and (name in names or pair[1] in self.advice):
            return f" Options have dashes: write --{name} {pair[2]}."
        if pair:
            return " Parts of one value have commas between them and no spaces."
        taken = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
        return f" Beside options it takes {' and '.join(taken) or 'nothing'} only."


def parse(
    kind: type[Options],
    arguments: Sequence[str],
    *,
    prog: str,
    about: str,
    examples: str,
    positional: Sequence[str] = (),
    advice: Mapping[str, str] | None = None,
) -> Options:
    """Return the options that a command line gives.

    Args:
        kind: A frozen dataclass whose fields were made by `option`.
        arguments: Without the command's name.
        prog: The command's name, for messages.
        about: One sentence for the help.
        examples: Shown at the end of the help.
        positional: Names of the fields that have no dashes.
        advice: What to do instead of options that others have, by their names.

    Raises:
        ConfigError: a mistake in the command line.
    """
    parser = parser_of(kind, prog=prog, about=about, examples=examples, positional=positional)
    parser.advice = advice or parser.advice
    return kind(**given_options(kind, parser, arguments))


def parser_of(
    kind: type[Any], *, prog: str, about: str, examples: str, positional: Sequence[str] = ()
) -> Parser:
    """Return the parser of a command line; `parse` says what the arguments are."""
    parser = Parser(
        prog=prog,
        description=about,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        _add(parser, field, hints[field.name], field.name in positional)
    return parser


def given_options(
    kind: type[Any], parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> dict[str, Any]:
    """Return what a command line says, by field; what it leaves out is not there.

    Raises:
        ConfigError: a mistake in the command line.
    """
    for argument in arguments:
        dashes = _LONG_DASHES.match(argument)
        flag = dashes and f"--{argument[dashes.end() :].partition('=')[0].lstrip('-')}"
        if flag in parser._option_string_actions:
            raise ConfigError(f"{argument} begins with a dash that is not '-'; type {flag}")
    arguments = _as_ours(parser, arguments)
    hints = typing.get_type_hints(kind)
    given = vars(parser.parse_args(_on_where_alone(kind, hints, arguments)))
    for name, value in given.items():
        if typing.get_origin(hints.get(name)) is tuple:
            given[name] = tuple(value)
    return given


def _as_ours(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return options as ours are written: `--local_steps` with dashes, `--plain True` as one.

    So is an option with a number below zero, of which argparse knows those without an exponent.
    What follows `--` is not an option.
    """
    known, found = parser._option_string_actions, list[str]()
    options = list(itertools.takewhile(lambda argument: argument != "--", arguments))
    for argument in options:
        name, equals, value = argument.partition("=")
        dashed = name.replace("_", "-")
        switched = f"{found[-1] if found else ''}={_TRUTHS.get(argument.lower(), argument.lower())}"
        if name.startswith("--") and dashed in known:
            switch = f"{dashed}={_TRUTHS.get(value.lower(), value.lower())}"
            found.append(switch if switch in known else f"{dashed}{equals}{value}")
        elif switched in known:
            found[-1] = switched
        elif found and found[-1] in known and _is_negative(argument):
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return [*found, *arguments[len(options) :]]


def _is_negative(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.startswith("-")


def _on_where_alone(
    kind: type[Any], hints: Mapping[str, Any], arguments: Sequence[str]
) -> list[str]:
    """Return the arguments, in which a switch that stands alone is `on`.

    Else argparse would take what follows for its value, a recipe's name too.
    """
    words = {_flag(field): words_of(hints[field.name]) for field in dataclasses.fields(kind)}
    return [
        f"{given}=on" if words.get(given) and following.lower() not in words[given] else given
        for given, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="")
    ]


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + (field.metadata.get("flag") or field.name.replace("_", "-"))


def _add(
    parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any, positional: bool
) -> None:
    about = field.metadata["help"].replace("%", "%%")
    settings: dict[str, Any] = {"help": about}
    if hint is bool:
        settings.update(action="store_true")
    else:
        settings["metavar"] = field.metadata["metavar"] or None
        settings["type"] = _converter(hint)
    if words_of(hint):
        settings.update(nargs="?", const=True)
    if typing.get_origin(hint) is tuple:
        settings.update({"nargs": "+"} if positional else {"action": "append"})
    if positional:
        parser.add_argument(field.name, **settings)
        return
    if field.default is dataclasses.MISSING:
        settings["required"] = True
    if field.default not in (None, False, (), "", dataclasses.MISSING):
        settings["help"] += f" Default: {field.default}."
    flag = _flag(field)
    parser.add_argument(flag, dest=field.name, **settings)
    if hint is bool:
        # What a recipe file turns on, the command line can turn off.
        for truth, action in (("true", "store_true"), ("false", "store_false")):
            parser.add_argument(
                f"{flag}={truth}", dest=field.name, action=action, help=argparse.SUPPRESS
            )


def _converter(hint: Any) -> Any:
    """Return what turns text into the field's type."""
    if words := words_of(hint):
        return lambda text: _word(words, text)
    if isinstance(hint, types.UnionType):
        return next(member for member in typing.get_args(hint) if member is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    return hint


def _word(words: Mapping[str, Any], text: str) -> Any:
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"takes {', '.join(words)}, not {text!r}")
    return words[text.lower()]


def check_checkpoint(path: Path) -> None:
    """Refuse a checkpoint that is not there, before anything heavy is imported.

    Raises:
        CheckpointError: it is not a folder.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give a checkpoint or the folder of a run")


def shown(text: str) -> str:
    """Return a text with a question mark for each character that a terminal might obey."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def complain(message: str) -> None:
    """Print one line on standard error; what peers or files say cannot steer the terminal."""
    line = " ".join(str(message).split())
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]} [...]"
    sys.stderr.write(f"{COMPLAINT}{shown(line)}\n")


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process with exit code 130 on SIGINT, without raising.

    For imports only: a `KeyboardInterrupt` in the middle of one is swallowed by packages that try
    an import and go on without it, and comes out as an unrelated error. There is nothing to save
    yet. Does nothing outside the main thread, or where SIGINT is ignored.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(_INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
