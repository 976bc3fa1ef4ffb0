"""A tokenizer as GGUF has it: tokens, merges or pieces, and the name of how text is cut.

llama.cpp knows the ways to cut text by name only (`tokenizer.ggml.pre`). A wrong name gives other
tokens without a word, so a tokenizer whose parts are not exactly those of a known one is refused.

Of a BPE tokenizer that was converted from SentencePiece llama.cpp merges the neighbours that make
the piece with the highest score, whichever way the piece is made; `tokenizers` goes by the rank of
each merge. Both find the same tokens if merges stand in the order of what they make, and none that
could be is missing. A conversion from SentencePiece is so; others are refused. The scores are those
ranks: SentencePiece's own are no more than that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from atomtrain.errors import ConfigError

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


_SPECIAL = ("bos", "eos", "unk", "pad")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Cut(NamedTuple):
    """How a tokenizer prepares text."""

    steps: tuple[str, ...]
    """Of its pre-tokenizer; `bytes` stands for bytes as letters, `words` for GPT-2's words too."""
    normalizers: tuple[str | None, ...]
    ignore_merges: bool
    """Whether a whole word that is a token needs no merges."""


_KNOWN = {
    "gpt-2": _Cut(("words",), (None,), False),
    "smollm": _Cut(("digits", "words"), (None,), False),
    # llama.cpp does not compose characters (NFC) either where Qwen's tokenizer does.
    "qwen2": _Cut((_WORDS + r"\p{N}" + _REST, "bytes"), (None, "NFC"), False),
    "llama-bpe": _Cut((_WORDS + r"\p{N}{1,3}" + _REST, "bytes"), (None,), True),
    "tekken": _Cut((_TEKKEN, "bytes"), (None,), True),
}
"""By the name that llama.cpp has for it (`src/llama-vocab.cpp`)."""


class Vocabulary(NamedTuple):
    """What GGUF says of a tokenizer."""

    pre: str
    """How text is cut; `default` of SentencePiece's, which do not cut it."""
    tokens: list[str]
    """By number, as many as the embedding has rows."""
    types: list[int]
    merges: list[str]
    pieces: Pieces | None
    """What SentencePiece's have in place of merges; `None` of others."""
    special: dict[str, int]
    """Numbers of `bos`, `eos`, `unk` and `pad`, those that there are."""
    adds: dict[str, bool]
    """Whether `bos` and `eos` are put around a text."""
    chat_template: str | list[dict[str, str]] | None


def vocabulary_of(texts: Mapping[str, str], rows: int) -> Vocabulary:
    """Return what GGUF says of a model's tokenizer.

    Args:
        texts: The small files of a Hugging Face folder, by name.
        rows: Of the embedding.

    Raises:
        ConfigError: llama.cpp has no such tokenizer.
    """
    stored = json.loads(texts["tokenizer.json"])
    settings = json.loads(texts["tokenizer_config.json"])
    model = stored["model"]
    pieces = None
    if model["type"] == "BPE" and model.get("byte_fallback"):
        try:
            pieces = pieces_of(stored, rows)
        except NotConvertedError as error:
            raise _refusal(str(error)) from error
    pre = "default" if pieces is not None else _pre_of(stored)
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [UNUSED] * rows
    for text, number in model["vocab"].items():
        tokens[number], types[number] = text, NORMAL
    if pieces is not None:
        types = list(pieces.types)
    for added in stored["added_tokens"]:
        tokens[added["id"]] = added["content"]
        if types[added["id"]] in (NORMAL, UNUSED):
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = _merges(model) if pieces is None else []
    numbers = {text: number for number, text in enumerate(tokens)}
    special = {}
    for kind in _SPECIAL:
        name = settings.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        if isinstance(name, str) and name in numbers:
            special[kind] = numbers[name]
    adds = _added(texts["tokenizer.json"], special)
    template = settings.get("chat_template") or texts.get("chat_template.jinja")
    if not isinstance(template, str | list | None):
        raise _refusal("has a chat template that is neither a text nor a list of them")
    return Vocabulary(pre, tokens, types, merges, pieces, special, adds, template)


def _merges(model: Mapping[str, Any]) -> list[str]:
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if odd := next((merge for merge in merges if merge.count(" ") != 1), None):
        raise _refusal(f"has a merge of tokens with spaces in them, {odd!r}")
    return merges


def _pre_of(stored: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer prepares text."""
    model = stored["model"]
    if model["type"] != "BPE":
        raise _refusal(f"is of the kind {model['type']}, not BPE")
    marks = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if odd := next((mark for mark in marks if model.get(mark)), None):
        raise _refusal(f"sets {odd}")
    normalizer = stored.get("normalizer")
    name = None if normalizer is None else normalizer["type"]
    cut = _steps(stored.get("pre_tokenizer"))
    ignores = bool(model.get("ignore_merges"))
    for pre, known in _KNOWN.items():
        if (cut, ignores) == (known.steps, known.ignore_merges) and name in known.normalizers:
            return pre
    raise _refusal("cuts text in a way that is not one of these")


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the steps of a pre-tokenizer as `_Cut` names them; others by their type."""
    if pre_tokenizer is None:
        return ()
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in _steps(part))
    if kind == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        return ("words" if pre_tokenizer.get("use_regex", True) else "bytes",)
    if kind == "Digits" and pre_tokenizer["individual_digits"]:
        return ("digits",)
    isolated = pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
    if kind == "Split" and isolated and "Regex" in pre_tokenizer["pattern"]:
        return (pre_tokenizer["pattern"]["Regex"],)
    return (kind,)


def _added(text: str, special: dict[str, int]) -> dict[str, bool]:
    """Return whether the tokenizer puts bos and eos around a text, found by encoding one."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(text)
    whole = backend.encode("a").ids
    bare = backend.encode("a", add_special_tokens=False).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
    if at is None:
        raise _refusal("changes the tokens of a text that it puts others around")
    before, behind = whole[:at], whole[at + len(bare) :]
    for kind, found in (("bos", before), ("eos", behind)):
        if found and found != [special.get(kind)]:
            names = [backend.id_to_token(number) for number in found]
            raise _refusal(f"puts {names} around a text, which is not its {kind}_token")
    return {"bos": bool(before), "eos": bool(behind)}


def _refusal(fault: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer {fault}; GGUF is written for those that cut text as "
        f"{', '.join(_KNOWN)} do, or as SentencePiece's BPE. Export a folder (leave out --gguf) "
        "and convert that"
    )
