"""The page of commands: `python -m atombench.pages.commands_page` writes `docs/commands.md`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from atombench.pages.writing import DOCS, write_page
from atomtrain.cli.completion import all_parsers, options_of

PAGE = DOCS / "commands.md"
_HEAD = """# Commands

Every command and option, written by `python -m atombench.pages.commands_page` from the code.
`atom COMMAND --help` says the same. Mistakes are told in one line, with exit code 2; Ctrl-C ends
with 130. `eval "$(atom completion bash)"` (or `zsh`, `fish`) completes commands and options.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for words, parser in all_parsers().items():
        parts.append("\n".join(_section(words, parser)))
    return "\n".join(parts)


def _section(words: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## atom {words}"
    yield ""
    about, _, more = (parser.description or "").partition("\n")
    yield about
    yield ""
    if more.strip():
        yield f"```text\n{more.strip(chr(10))}\n```"
        yield ""
    yield "| option | what it does |"
    yield "|---|---|"
    for action in options_of(parser):
        if "--help" not in action.option_strings:
            yield f"| {_name(action)} | {_cell(action.help)} |"
    yield ""
    examples = (parser.epilog or "").removeprefix("examples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    yield "\n".join(("```text", *lines, "```", ""))


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest.upper()}`"
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"`{action.option_strings[-1]}{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write_page(PAGE, page())
