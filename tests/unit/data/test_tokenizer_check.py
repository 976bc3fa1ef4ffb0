"""Tokenizers that may take for ever, or make texts much longer, are refused; usual ones are not."""

from __future__ import annotations

import pytest

from atomtrain.data.tokenizer import Tokenizer
from atomtrain.data.tokenizer_check import check_pattern
from atomtrain.errors import DataError

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
USUAL = [
    WORDS, LETTERS, r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+", r"(?=(\d{3})+(?!\d))",
    r"\d{1,3}(?=(?:\d{3})*\b)", r"[\p{Lu}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+", r" {2,}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"(?:^|[^\d])\d", r"[0-9][0-9][0-9]",
]  # fmt: skip
SLOW = [
    r"(a+)+b", r"(a|a)*b", r"(?:a?){50}b", r"(\w+\s?)+$", r"((a*)b?)*c", r"a*a*a*a*a*b",
    r"(a{1,9}){1,9}b", r"(?<x>a\g<x>?b)", r"(a)\1*", r"(?:(?:a)*)+",
]  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_taken(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", SLOW)
def test_slow_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(DataError, match="may take for ever"):
        check_pattern(pattern)


def test_a_text_that_is_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.data.tokenizer._MOST_CHARACTERS", 200)
    made = Tokenizer.train(["the cat sat"], 300)
    assert made.encode("a" * 100)  # a byte may become two, so half as many are taken
    with pytest.raises(DataError, match="a text of 101 characters is too long"):
        made.encode("a" * 101)
