"""A tokenizer as transformers converts one of SentencePiece: byte fallback, all merges by score."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
SPECIAL = ("<unk>", "<s>", "</s>")
LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}


def added(number: int, content: str) -> dict[str, Any]:
    """Return a special token."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def learnt(texts: Iterable[str], most: int) -> tuple[list[str], list[str]]:
    """Return pieces in the order in which they were learnt, and single characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=most, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    made = ["".join(merge) for merge in model["merges"]]
    return list(dict.fromkeys(made)), [text for text in model["vocab"] if len(text) == 1]


def converted(texts: Iterable[str], most: int = 120, **changes: Any) -> dict[str, Any]:
    """Return the content of a tokenizer.json as of Llama 2.

    Args:
        texts: To learn from.
        most: Pieces beside special ones and bytes.
        changes: Of the file's content, or of `model` where that has the name.
    """
    pieces, letters = learnt(texts, most)
    tokens = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), *pieces, *letters]
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = [
        [piece[:at], piece[at:]]
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    stored: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added(number, text) for number, text in enumerate(SPECIAL)],
        "normalizer": LEGACY, "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "byte_fallback": True,
            "ignore_merges": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    for name, value in changes.items():
        (stored if name in stored else stored["model"])[name] = value
    return stored


SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
    "unk_token": "<unk>",
}  # fmt: skip
