"""GGUF: what is said of models and tokenizers, those converted from SentencePiece too."""

from __future__ import annotations

import itertools
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from atomtrain.data.tokenizer import Tokenizer
from atomtrain.errors import ConfigError
from atomtrain.training.tools import gguf_file
from atomtrain.training.tools.gguf_file import described, rope_factors, turned
from atomtrain.training.tools.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    vocabulary_of,
)
from tests.support.sentencepiece import LEGACY, SETTINGS, SPACE, converted

SENTENCE = "the cat sat on the mat "
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
WORDS = {**BYTES, "use_regex": True}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def texts(
    pre_tokenizer: Any = WORDS, normalizer: Any = None, settings: Any = None, **model: Any
) -> dict[str, str]:
    stored = json.loads(Tokenizer.train([SENTENCE], 270).to_json())
    stored.update(pre_tokenizer=pre_tokenizer, normalizer=normalizer)
    if "added_tokens" in model:
        stored["added_tokens"] += model.pop("added_tokens")
    if "post_processor" in model:
        stored["post_processor"] = model.pop("post_processor")
    stored["model"].update(model)
    config = {"eos_token": "<|endoftext|>", **(settings or {})}
    return {"tokenizer.json": json.dumps(stored), "tokenizer_config.json": json.dumps(config)}


@pytest.mark.parametrize(
    ("pre", "given"),
    [
        ("gpt-2", texts()),
        ("smollm", texts(sequence({"type": "Digits", "individual_digits": True}, WORDS))),
        ("qwen2", texts(sequence(split(QWEN), BYTES), {"type": "NFC"})),
        ("llama-bpe", texts(sequence(split(LLAMA_3), BYTES), ignore_merges=True)),
    ],
)
def test_name_of_a_tokenizer_is_found_from_how_it_cuts(pre: str, given: dict[str, str]) -> None:
    assert vocabulary_of(given, 300).pre == pre


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (texts(split(QWEN)), "cuts text in a way"),
        (texts(sequence(split(QWEN + "|x"), BYTES)), "cuts text in a way"),
        (texts(sequence(split(LLAMA_3), BYTES)), "cuts text in a way"),  # it needs ignore_merges
        (texts(normalizer={"type": "NFC"}), "cuts text in a way"),
        (texts({**WORDS, "add_prefix_space": True}), "cuts text in a way"),
        (texts(byte_fallback=True), "no piece <0x00>"),
        (texts(type="WordPiece"), "of the kind WordPiece"),
        (texts(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    ],
)
def test_tokenizer_that_llama_cpp_lacks_is_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        vocabulary_of(given, 300)


def begins_with(token: str, number: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": special, **rest}


def test_added_tokens_and_what_is_put_before_a_text() -> None:
    size = len(json.loads(texts()["tokenizer.json"])["model"]["vocab"])
    more = [added(size, "<bos>", special=True), added(size + 1, "<tool>", special=False)]
    given = texts(
        settings={"bos_token": {"content": "<bos>"}, "chat_template": "{{ x }}"},
        added_tokens=more,
        post_processor=begins_with("<bos>", size),
    )
    found = vocabulary_of(given, size + 4)
    assert found.tokens[size : size + 2] == ["<bos>", "<tool>"]
    assert found.types[size:] == [CONTROL, USER_DEFINED, UNUSED, UNUSED]
    assert found.special == {"bos": size, "eos": 0}
    assert found.adds == {"bos": True, "eos": False}
    assert found.chat_template == "{{ x }}"
    other = texts(added_tokens=more, post_processor=begins_with("<bos>", size))
    with pytest.raises(ConfigError, match="not its bos_token"):
        vocabulary_of(other, size + 4)


def config(kind: str = "llama", **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**sizes, **changes})


@pytest.mark.parametrize(("kind", "heads"), [("q", 4), ("k", 2)])
def test_rows_of_queries_and_keys_become_neighbours(kind: str, heads: int) -> None:
    width, model = 16, described(config(), "llama")
    bias = torch.arange(float(heads * width))
    name = f"model.layers.0.self_attn.{kind}_proj"
    found = turned(f"{name}.bias", bias, model)
    assert found[:4].tolist() == [0, width / 2, 1, width / 2 + 1]
    assert found[width : width + 2].tolist() == [width, width * 1.5]
    weight = torch.stack([bias, -bias], 1)
    assert torch.equal(turned(f"{name}.weight", weight, model), torch.stack([found, -found], 1))
    assert turned(f"{name}.weight", weight, described(config("qwen2"), "qwen2")) is weight


def test_long_contexts_of_llama_3_become_a_factor_for_each_frequency() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    sizes = {"hidden_size": 512, "head_dim": 128, "max_position_embeddings": 131072}
    factors = rope_factors(described(config(rope_parameters=rope, **sizes), "llama"))
    assert factors is not None
    lengths = [2 * math.pi * 500000.0 ** (i / 64) for i in range(64)]
    for length, factor in zip(lengths, factors.tolist(), strict=True):
        share = min(1.0, max(0.0, (8192 / length - 1) / 3))  # of the frequency as it was
        assert factor == pytest.approx(1 / ((1 - share) / 8 + share), rel=1e-5)
    assert factors[0] == 1
    assert factors[-1] == 8
    assert rope_factors(described(config(), "llama")) is None


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma", {}, "for llama, mistral, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type linear",
        ),
    ],
)
def test_model_that_is_not_written_is_refused(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        described(config(kind, **changes), kind)


def test_context_is_that_of_a_window_only_where_one_slides() -> None:
    assert described(config("mistral", sliding_window=96), "mistral").context == 96
    assert described(config("qwen2", sliding_window=96), "qwen2").context == 128
    slides = config("qwen2", sliding_window=96, use_sliding_window=True, max_window_layers=0)
    assert described(slides, "qwen2").context == 96


def test_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    made: list[weakref.ref[torch.Tensor]] = []

    def read() -> torch.Tensor:
        assert not any(earlier() is not None for earlier in made)
        tensor = torch.ones(4, 32)
        made.append(weakref.ref(tensor))
        return tensor

    kinds = ("F16", "BF16", "Q8_0", "F32")
    entries = [gguf_file._Entry(kind, (4, 32), kind, read) for kind in kinds]
    vocabulary = vocabulary_of(texts(), 300)
    file = tmp_path / "m.gguf"
    gguf_file._write(file, "m", described(config(), "llama"), vocabulary, entries, "f16")
    assert len(made) == len(kinds)


def test_number_that_f16_cannot_hold_is_refused() -> None:
    pytest.importorskip("gguf")
    entry = gguf_file._Entry("output.weight", (1, 2), "F16", lambda: torch.tensor([[1.0, 1e6]]))
    with pytest.raises(ConfigError, match="choose bf16 or q8_0"):
        gguf_file._packed(entry)


def test_command_refuses_before_it_reads_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(target: str, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            gguf_file.export_gguf(None, tmp_path / target, *more)  # type: ignore[arg-type]
        return str(caught.value)

    (tmp_path / "there.gguf").write_text("")
    assert "f16, bf16 or q8_0" in refused("a.gguf", "q4_k")
    assert "a.gguf" in refused("a", "f16")
    assert "is there already" in refused("there.gguf", "f16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'atomtrain[gguf]'" in refused("a.gguf", "f16")
    assert "\n" not in refused("a.gguf", "f16")
    from atomtrain.cli.main import main

    assert main(["export", "run", "a.gguf", "--gguf", "f16", "--dtype", "bfloat16"]) == 2
    assert "leave out --dtype" in capsys.readouterr().err


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
    expected = Backend.from_str(json.dumps(stored)).encode(text, add_special_tokens=False).ids
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
