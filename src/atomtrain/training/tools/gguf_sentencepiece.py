"""A BPE tokenizer that was converted from SentencePiece, as GGUF has it: pieces with scores.

llama.cpp merges the neighbours that make the piece with the highest score, whichever way the piece
is made; `tokenizers` goes by the rank of each merge. Both find the same tokens if merges stand
in the order of what they make, and none that could be is missing. A conversion from SentencePiece
is so; others are refused. The scores are those ranks: SentencePiece's own are no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, by the numbers of `gguf.TokenType`."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


class NotConvertedError(Exception):
    """The tokenizer was not converted from SentencePiece, or does what llama.cpp does not; the
    message goes on where `the tokenizer` ends."""


class Pieces(NamedTuple):
    """What GGUF says of SentencePiece's tokens beside their texts, by number."""

    types: list[int]
    scores: list[float]
    space_prefix: bool
    """Whether a text begins with a space that it does not have."""


def pieces_of(stored: Mapping[str, Any], rows: int) -> Pieces:
    """Return what a `tokenizer.json` with byte fallback says of its pieces.

    Args:
        stored: Its content.
        rows: Of the embedding.

    Raises:
        NotConvertedError: it is not SentencePiece's, or llama.cpp would find other tokens.
    """
    model = stored["model"]
    vocab: Mapping[str, int] = model["vocab"]
    if missing := next((piece for piece in _BYTES if piece not in vocab), None):
        raise NotConvertedError(f"has byte fallback, but no piece {missing}")
    marks = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if odd := next((mark for mark in marks if model.get(mark)), None):
        raise NotConvertedError(f"sets {odd}")
    prefix = _space_prefix(stored)
    special = {added["content"] for added in stored["added_tokens"]}
    plain = set(vocab) - special - set(_BYTES) - {model.get("unk_token")}
    order = _order(model["merges"], plain)
    types, scores = [UNUSED] * rows, [0.0] * rows
    others = len(order)
    for text, number in sorted(vocab.items(), key=lambda item: item[1]):
        types[number] = NORMAL
        if text in order:
            scores[number] = -float(order[text])
        elif text == model.get("unk_token"):
            types[number] = UNKNOWN
        elif text in _BYTES:
            types[number] = BYTE
        elif text in plain:
            scores[number] = -float(others)
            others += 1
    return Pieces(types, scores, prefix)


def _order(merges: Sequence[Any], plain: Set[str]) -> dict[str, int]:
    """Return the rank of each piece that merges make, of all that are no bytes and not special.

    Raises:
        NotConvertedError: merges are not in the order of what they make, or one is missing.
    """
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
    order: dict[str, int] = {}
    last = None
    for pair in pairs:
        made = "".join(pair)
        if made != last and made in order:
            raise NotConvertedError(f"makes {made!r} at several ranks, as SentencePiece does not")
        order.setdefault(made, len(order))
        last = made
    known = set(pairs)
    found = {piece for piece in plain if len(piece) == 1 or piece in order}
    for piece in plain:
        for at in range(1, len(piece)):
            parts = piece[:at], piece[at:]
            if parts not in known and found.issuperset(parts):
                raise NotConvertedError(
                    f"has {piece!r} but does not merge {parts[0]!r} and {parts[1]!r} to it, as "
                    "SentencePiece does"
                )
    return order


def _space_prefix(stored: Mapping[str, Any]) -> bool:
    """Return whether a space is put before a text; everything else must be SentencePiece's way.

    Raises:
        NotConvertedError: it is not. A space before the very first text only, or only before one
            that has none, is nothing that llama.cpp does.
    """
    normalizer, cut = stored.get("normalizer"), stored.get("pre_tokenizer")
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if cut is None and steps == [{"type": "Prepend", "prepend": _SPACE}, spaces]:
        return True
    if cut is None and steps == [spaces]:
        return False
    if cut is not None and cut.get("type") == "Metaspace" and not steps:
        scheme, split = cut.get("prepend_scheme"), cut.get("split", True)
        if (cut.get("replacement"), scheme, split) == (_SPACE, "never", False):
            return False
        raise NotConvertedError(
            f"prepares text by Metaspace with prepend_scheme {scheme!r} and split {split}, which "
            "llama.cpp does not"
        )
    raise NotConvertedError("has byte fallback, but does not prepare text as SentencePiece does")
