"""The token file: right content, in two parts, made once; loss converted to bits per byte."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from atomtrain.data import tokens
from atomtrain.data.corpus import Corpus, Part, corpus_of_texts, pieces
from atomtrain.data.tokenizer import Tokenizer
from atomtrain.data.tokens import Tokens, bits_per_byte, open_tokens, prepare
from atomtrain.files import default_cache


def make_corpus(extra: str = "") -> Corpus:
    first = "".join(f"Line {index} of the first text.\n\n" for index in range(600))
    second = "".join(f"Zeile {index}: süß.\n" for index in range(600))
    return corpus_of_texts("two texts", [first, second + extra])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train((piece.text for piece in pieces(make_corpus(), "train")), 400)


def expected(corpus: Corpus, tokenizer: Tokenizer, part: Part) -> str:
    text = ""
    for index, piece in enumerate(pieces(corpus, part)):
        if index and not piece.continues:
            text += tokenizer.separator_text
        text += piece.text
    return text + tokenizer.separator_text


def test_the_file_holds_both_parts_of_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = make_corpus()
    found = open_tokens(corpus, tokenizer, tmp_path)
    assert tokenizer.decode(found.train.tolist()) == expected(corpus, tokenizer, "train")
    assert tokenizer.decode(found.held_out.tolist()) == expected(corpus, tokenizer, "held_out")
    assert found.train_bytes + found.held_out_bytes == corpus.size_bytes
    assert found.vocabulary == tokenizer.vocabulary
    assert found.train.dtype == np.uint16


def test_the_tokens_cannot_be_written_to(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = open_tokens(make_corpus(), tokenizer, tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        found.train[0] = 1


def test_large_vocabularies_take_four_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    wide = Tokenizer.from_json(tokenizer.to_json())
    wide.vocabulary = 2**16 + 1
    found = open_tokens(make_corpus(), wide, tmp_path)
    assert found.train.dtype == np.uint32
    assert wide.decode(found.train.tolist()) == expected(make_corpus(), wide, "train")


def test_the_file_is_made_once_and_used_again(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_tokens(make_corpus(), tokenizer, tmp_path)
    monkeypatch.setattr(tokens, "_build", None)
    again = open_tokens(make_corpus(), tokenizer, tmp_path)
    assert np.array_equal(first.train, again.train)
    assert first.path == again.path


def test_other_texts_and_tokenizers_get_files_of_their_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    other = Tokenizer.train(["something else"], 300)
    paths = {
        open_tokens(make_corpus(), tokenizer, tmp_path).path,
        open_tokens(make_corpus("x"), tokenizer, tmp_path).path,
        open_tokens(make_corpus(), other, tmp_path).path,
    }
    assert len(paths) == 3


def test_a_uniform_guess_costs_what_theory_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert bits_per_byte(math.log(2), tokens=10, size_bytes=10) == pytest.approx(1.0)
    assert bits_per_byte(math.log(256), tokens=5, size_bytes=20) == pytest.approx(2.0)
    found: Tokens = open_tokens(make_corpus(), tokenizer, tmp_path)
    ratio = len(found.held_out) / found.held_out_bytes
    assert found.held_out_bits_per_byte(math.log(4)) == pytest.approx(2 * ratio)


def test_prepare_trains_a_tokenizer_without_held_out_text_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus()
    learnt: list[str] = []
    train = Tokenizer.train

    def spy(texts: list[str], vocabulary: int) -> Tokenizer:
        learnt.extend(texts)
        return train(learnt, vocabulary)

    monkeypatch.setattr(Tokenizer, "train", spy)
    first = prepare(corpus, tmp_path, vocabulary=300)
    assert learnt == [piece.text for piece in pieces(corpus, "train")]
    monkeypatch.setattr(Tokenizer, "train", None)
    again = prepare(corpus, tmp_path, vocabulary=300)
    assert again.tokenizer.to_json() == first.tokenizer.to_json()
    assert again.tokens.path == first.tokens.path


def test_prepare_uses_a_given_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepared = prepare(make_corpus(), tmp_path, tokenizer=tokenizer)
    assert prepared.tokenizer is tokenizer
    assert prepared.tokens.vocabulary == tokenizer.vocabulary


def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "atomtrain"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "atomtrain"
