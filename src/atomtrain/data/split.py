"""The held-out split: a function of the text alone, so that all peers hold out the same pieces.

Documents are cut into chunks of at most 32 Ki characters, at paragraph boundaries where there
are any. Chunks are counted through the corpus, and every twentieth is held out: contiguous text,
spread over all of it, that no peer ever trains on. Of small corpora the chunks are smaller, so
that there are enough of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from atomtrain.data.corpus import Corpus

Part = Literal["train", "held_out", "whole"]
HoldOut = Literal["some", "none", "all"]
"""What of a source is held out; `none` and `all` where what a run is judged by is named."""

SPLIT_VERSION = 1
HELD_OUT_EVERY = 20
MAX_CHUNK_CHARACTERS = 32 * 1024
MIN_CHUNKS = 2 * HELD_OUT_EVERY

# In the middle of its twenty: neither the beginning nor the end of a corpus is typical of it.
_HELD_OUT_INDEX = HELD_OUT_EVERY // 2
_BOUNDARIES = ("\n\n", "\n", " ")


class Piece(NamedTuple):
    """A chunk that belongs to the part asked for."""

    text: str
    continues: bool
    """Whether it follows the piece before it directly, in the same document."""


def pieces(corpus: Corpus, part: Part) -> Iterator[Piece]:
    """Yield the chunks of one part (or of all) in order, one document in memory at a time."""
    limit = min(MAX_CHUNK_CHARACTERS, corpus.characters // MIN_CHUNKS)
    index = 0
    for document in corpus.documents:
        continues = False
        for text in chunks(document.read(), limit):
            is_held_out = index % HELD_OUT_EVERY == _HELD_OUT_INDEX
            index += 1
            if part == "whole" or is_held_out == (part == "held_out"):
                yield Piece(text, continues)
                continues = True
            else:
                continues = False


def chunks(text: str, limit: int) -> Iterator[str]:
    """Cut `text` into chunks of at most `limit` characters that join to it exactly.

    A cut is made after the last paragraph end, else line end, else space, in the second half of
    what would fit, else where it is full.
    """
    start = 0
    while len(text) - start > limit:
        end = _cut(text, start + limit // 2, start + limit)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _cut(text: str, first: int, last: int) -> int:
    for boundary in _BOUNDARIES:
        found = text.rfind(boundary, first, last)
        if found >= 0:
            return found + len(boundary)
    return last
