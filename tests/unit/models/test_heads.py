"""Heads that judge whole sequences: what a configuration says of them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from atomtrain.errors import ConfigError
from atomtrain.models.heads import labels_of, numbers_of_labels, padding_of, with_head
from atomtrain.training.config.new_recipe import check_head_of
from tests.support.hugging_face_models import LLAMA

NAMED = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "id2label": {"0": "a", "1": "b"}}, None),
        ({}, None),
        ({"architectures": "LlamaForSequenceClassification"}, None),
        (NAMED, ["LABEL_0", "LABEL_1"]),
        ({**NAMED, "num_labels": 1}, ["LABEL_0"]),
        ({**NAMED, "id2label": {"1": "b", "0": "a"}}, ["a", "b"]),
    ],
)
def test_labels_stand_in_the_configuration(
    config: dict[str, Any], expected: list[str] | None
) -> None:
    assert labels_of(config) == expected


@pytest.mark.parametrize(
    "said",
    [
        {"id2label": {}}, {"id2label": {"1": "a"}}, {"id2label": {"0": "a", "x": "b"}},
        {"id2label": {"0": 1}}, {"id2label": ["a", "b"]}, {"num_labels": 0},
        {"num_labels": 1 << 40}, {"num_labels": "two"},
    ],
)  # fmt: skip
def test_labels_that_cannot_be_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must"):
        labels_of({**NAMED, **said})


def test_numbers_are_labels_where_nobody_has_named_them() -> None:
    assert numbers_of_labels(["a", "b"]) == {"a": 0, "b": 1}
    assert numbers_of_labels(["1", "0"]) == {"1": 0, "0": 1}
    assert numbers_of_labels(["LABEL_0", "LABEL_1"]) == {
        "LABEL_0": 0, "LABEL_1": 1, "0": 0, "1": 1,
    }  # fmt: skip


def test_padding_is_what_the_configuration_names_if_there_is_such_a_token() -> None:
    assert padding_of(LLAMA, 7) == 7
    for named, expected in ((0, 0), (299, 299), (300, 7), (-1, 7), (None, 7)):
        assert padding_of({**LLAMA, "pad_token_id": named}, 7) == expected
        inside = {"text_config": {**LLAMA, "pad_token_id": named}}
        assert padding_of(inside, 7) == expected


def test_a_head_is_put_into_the_configuration() -> None:
    pytest.importorskip("transformers")
    made = with_head({**LLAMA, "text_config": {"vocab_size": 300}}, ["a", "b"], 7)
    assert labels_of(made) == ["a", "b"]
    assert made["text_config"]["pad_token_id"] == made["pad_token_id"] == 7
    assert labels_of(with_head(LLAMA, None, 7)) == ["LABEL_0"]
    with pytest.raises(ConfigError, match="no model with a head for classes of the type 'granite'"):
        with_head({**LLAMA, "model_type": "granite"}, ["a", "b"], 7)
    several = {**LLAMA, "problem_type": "multi_label_classification"}
    with pytest.raises(ConfigError, match="where a text is not of one class"):
        with_head(several, ["a", "b"], 7)


@pytest.mark.parametrize(
    ("objective", "labels", "expected"),
    [
        ("next-token", ["a", "b"], "has a head of 2 outputs on a sequence, which --objective next"),
        ("dpo", ["a"], "give --objective reward"),
        ("reward", ["a", "b"], "give --objective classify"),
        ("classify", ["a"], "give --objective reward"),
        ("classify", None, "is a language model, which --objective classify does not train"),
        ("embed", None, "is a language model, which --objective embed does not train"),
    ],
)
def test_a_head_is_trained_for_what_it_says(
    objective: str, labels: list[str] | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_head_of(objective, cast(Any, SimpleNamespace(labels=labels)), "model")


@pytest.mark.parametrize(
    ("objective", "labels"),
    [("next-token", None), ("kto", None), ("reward", ["a"]), ("classify", ["a", "b"])],
)
def test_a_head_that_fits_is_taken(objective: str, labels: list[str] | None) -> None:
    check_head_of(objective, cast(Any, SimpleNamespace(labels=labels)), "model")
