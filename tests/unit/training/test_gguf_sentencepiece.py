"""Tokenizers of SentencePiece in GGUF: the tokens of llama.cpp's way are those of `tokenizers`."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from atomtrain.errors import ConfigError
from atomtrain.training.tools.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    Vocabulary,
    vocabulary_of,
)
from tests.support.sentencepiece import LEGACY, SETTINGS, SPACE, converted

TEXTS = ["the cat sat on the mat and the dog lay by the door while rain fell on the roof"] * 3
STORED = converted(TEXTS)
ROWS = len(STORED["model"]["vocab"]) + 5
BARE = LEGACY["normalizers"][1]


def vocabulary(stored: dict[str, Any], rows: int = ROWS) -> Vocabulary:
    files = {"tokenizer.json": json.dumps(stored), "tokenizer_config.json": json.dumps(SETTINGS)}
    return vocabulary_of(files, rows)


def tokens_of_llama_cpp(text: str, found: Vocabulary) -> list[int]:
    """Return what its tokenizer of the kind `llama` finds in a text without special tokens."""
    assert found.pieces is not None
    numbers = {token: number for number, token in enumerate(found.tokens)}
    symbols = list((" " * found.pieces.space_prefix + text).replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-found.pieces.scores[numbers[made]], at)
            for at, made in enumerate(a + b for a, b in itertools.pairwise(symbols))
            if made in numbers
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result = []
    for symbol in symbols:
        if symbol in numbers:
            result.append(numbers[symbol])
        else:
            result += [numbers[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


@pytest.mark.parametrize("prefix", [True, False])
@settings(deadline=None)
@given(text=st.text("thecasonmdlyrwifpu  \nZ\u00e9\u6f22\U0001f600", max_size=40))
def test_llama_cpp_finds_the_tokens_of_tokenizers(prefix: bool, text: str) -> None:
    stored = STORED if prefix else {**STORED, "normalizer": BARE}
    found = vocabulary(stored)
    assert found.pieces is not None
    assert found.pieces.space_prefix is prefix
    expected = Tokenizer.from_str(json.dumps(stored)).encode(text, add_special_tokens=False).ids
    assert tokens_of_llama_cpp(text, found) == expected


def test_types_scores_and_what_is_put_before_a_text() -> None:
    found = vocabulary(STORED)
    assert found.pieces is not None
    assert (found.pre, found.merges) == ("default", [])
    assert found.types[:3] == [UNKNOWN, CONTROL, CONTROL]
    assert found.types[3:259] == [BYTE] * 256
    assert found.types[259:] == [NORMAL] * (ROWS - 5 - 259) + [UNUSED] * 5
    scores = found.pieces.scores
    assert scores[:259] == [0.0] * 259
    assert scores[259 : ROWS - 5] == [-float(rank) for rank in range(ROWS - 5 - 259)]
    assert found.special == {"bos": 1, "eos": 2, "unk": 0}
    assert found.adds == {"bos": True, "eos": False}


def with_vocab(change: dict[str, int | None], **more: Any) -> dict[str, Any]:
    vocab = {**STORED["model"]["vocab"], **change}
    kept = {text: number for text, number in vocab.items() if number is not None}
    return {**STORED, "model": {**STORED["model"], "vocab": kept, **more}}


_MERGES = STORED["model"]["merges"]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (with_vocab({"<0x7F>": None}), "but no piece <0x7F>"),
        (with_vocab({}, dropout=0.1), "sets dropout"),
        (with_vocab({}, merges=_MERGES[::-1][:-1]), "does not merge"),
        (with_vocab({}, merges=[*_MERGES[1:5], *_MERGES, _MERGES[0]]), "at several ranks"),
        (with_vocab({"".join([*_MERGES[0], "x"]): 400, "x": 401}), "does not merge"),
        ({**STORED, "normalizer": None}, "does not prepare text"),
        (
            {
                **STORED, "normalizer": None,
                "pre_tokenizer": {
                    "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first",
                    "split": False,
                },
            },
            "prepend_scheme 'first'",
        ),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_cut_otherwise_is_refused(stored: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        vocabulary(stored, 500)
    assert "\n" not in str(refused.value)
    assert "or as SentencePiece's BPE" in str(refused.value)


def test_metaspace_without_a_prefix_is_taken() -> None:
    metaspace = {
        "type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False,
    }  # fmt: skip
    found = vocabulary({**STORED, "normalizer": None, "pre_tokenizer": metaspace})
    assert found.pieces is not None
    assert not found.pieces.space_prefix
