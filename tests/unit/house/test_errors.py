"""Errors: one family, each also an error of Python's that callers expect, with exit codes."""

from __future__ import annotations

import pytest

from atomtrain import errors
from atomtrain.errors import AtomError, choices, nearest, reason_of

FAMILY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, AtomError)
]


def test_every_error_is_of_the_family_and_has_an_exit_code_that_is_no_success() -> None:
    assert len(FAMILY) >= 9
    for kind in FAMILY:
        assert kind.exit_code in (1, 2)
        given = "what, allowed, next"
        assert str(kind(given)) == given
        assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DeviceMemoryError, MemoryError),
        (errors.StreamError, RuntimeError),
    ],
)
def test_errors_are_caught_as_pythons_own(kind: type[AtomError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin):
        raise kind("x")


def test_the_nearest_name_is_offered_only_if_there_is_one() -> None:
    assert nearest("emulatd", ["auto", "cuda", "emulated"]) == " Did you mean 'emulated'?"
    assert nearest("zzz", ["auto", "cuda"]) == ""
    assert nearest("x", []) == ""
    assert nearest("gpt3-175", (name for name in ["gpt3-175b", "tiny"])).endswith("'gpt3-175b'?")


def test_choices_end_in_a_sentence_only_if_one_is_near() -> None:
    assert choices("x", ["a", "b", "c"]) == "a, b or c"
    assert choices("glo", ["libp2p", "gloo"]) == "libp2p or gloo. Did you mean 'gloo'?"


def test_what_another_error_says_becomes_part_of_a_sentence() -> None:
    error = RuntimeError("The size of tensor a (3) must match.\nMore of it.")
    assert reason_of(error) == "The size of tensor a (3) must match"
    assert reason_of(ValueError()) == ""
