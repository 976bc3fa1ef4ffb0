"""The tokenizer: exact round trips, no forged separators, equal for equal texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.data.corpus import pieces, read_corpus
from atomtrain.data.tokenizer import SEPARATOR, Tokenizer
from atomtrain.errors import DataError

SAMPLE = ["the cat and the hat and the bat\n" * 50, "über Äpfel 漢字 🙂\r\n\t" * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SAMPLE, vocabulary=400)


# Built once for hypothesis, which does not mix with fixtures of module scope in one test.
TRAINED = Tokenizer.train(SAMPLE, vocabulary=300)


@given(text=st.text())
@settings(deadline=None, max_examples=200)
def test_any_text_comes_back_exactly(text: str) -> None:
    numbers = TRAINED.encode(text)
    assert TRAINED.decode(numbers) == text
    assert TRAINED.separator not in numbers
    assert all(0 <= number < TRAINED.vocabulary for number in numbers)


@given(texts=st.lists(st.text(), max_size=5))
@settings(deadline=None, max_examples=50)
def test_a_batch_is_encoded_as_its_texts_are(texts: list[str]) -> None:
    assert TRAINED.encode_batch(texts) == [TRAINED.encode(text) for text in texts]


@pytest.mark.parametrize(
    "text", ["", " ", "\0", "a" * 5000, f"x{SEPARATOR}y", "\ufeffBOM", "e\u0301 \u200d\u2028"]
)
def test_awkward_texts_come_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    numbers = tokenizer.encode(text)
    assert tokenizer.decode(numbers) == text
    assert tokenizer.separator not in numbers


def test_the_separator_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.separator]) == SEPARATOR


def test_json_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_json(tokenizer.to_json())
    text = f"the hat {SEPARATOR} 漢"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.separator not in again.encode(text)
    assert (again.vocabulary, again.separator) == (tokenizer.vocabulary, tokenizer.separator)
    assert again.to_json() == tokenizer.to_json()
    assert again.sha256 == tokenizer.sha256


def test_equal_texts_give_an_equal_tokenizer(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(SAMPLE, 400).to_json() == tokenizer.to_json()
    assert Tokenizer.train(SAMPLE[:1], 400).sha256 != tokenizer.sha256


@pytest.mark.parametrize("text", ["", "{}", "not json", "[1, 2]", '{"model": 3}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        Tokenizer.from_json(text)


def test_a_foreign_separator_can_be_named_and_must_exist(tokenizer: Tokenizer) -> None:
    named = Tokenizer.from_json(tokenizer.to_json(), separator="the")
    assert named.decode([named.separator]) == "the"
    with pytest.raises(DataError, match=r"no token '</s>'"):
        Tokenizer.from_json(tokenizer.to_json(), separator="</s>")


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(DataError, match="256 is too small; it must be at least 257"):
        Tokenizer.train(SAMPLE, 256)
    assert Tokenizer.train(SAMPLE, 257).vocabulary == 257


@pytest.mark.slow
def test_four_megabytes_are_learnt_in_seconds() -> None:
    texts = [piece.text for piece in pieces(read_corpus(None), "train")]
    trained = Tokenizer.train(texts)
    assert trained.vocabulary == 4096
    encoded = trained.encode_batch(texts[:5])
    assert [trained.decode(numbers) for numbers in encoded] == texts[:5]
    assert sum(map(len, texts[:5])) / sum(map(len, encoded)) > 3
