"""Rows with a text and a label: names, order, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atomtrain.data.chat import ChatTemplate, Encoder
from atomtrain.data.dialogues import NoAnswerError
from atomtrain.data.examples import Examples
from atomtrain.data.labels import labels_in, understand_labelled
from atomtrain.data.material import ExampleMaterial
from atomtrain.data.rows import Row
from atomtrain.errors import DataError
from tests.support.hugging_face_models import tokenizer


def row(**values: Any) -> Row:
    return Row("file.jsonl:7", values)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("cat", "cat"),
        (2, "2"),
        ("2", "2"),
        (2.0, "2"),
        (True, "true"),
        (False, "false"),
        (-1, "-1"),
    ],
)
def test_a_label_has_a_name(label: object, name: str) -> None:
    assert understand_labelled(row(text="a", label=label)).label == name


@pytest.mark.parametrize("label", [None, math.nan, "", " "])
def test_a_row_without_a_label_says_nothing(label: object) -> None:
    with pytest.raises(NoAnswerError, match=r"file.jsonl:7: 'label' is empty"):
        understand_labelled(row(text="a", label=label))


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_row_without_a_text_says_nothing(text: object) -> None:
    with pytest.raises(NoAnswerError, match=r"file.jsonl:7: 'text' is empty"):
        understand_labelled(row(text=text, label="a"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "a"}, "has 'text'; classes are learnt from rows with text and label"),
        ({"label": 1}, "has 'label'; classes"),
        ({"text": "a", "label": 0.5}, "'label' must be a text or a whole number, not 0.5"),
        ({"text": "a", "label": math.inf}, "not inf"),
        ({"text": "a", "label": [1]}, "'label' must be a text or a whole number"),
        ({"text": math.nan, "label": 1}, "'text' must be a text, not float"),
    ],
)
def test_bad_rows_are_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        understand_labelled(row(**values))
    assert not isinstance(caught.value, NoAnswerError)
    assert str(caught.value).startswith("file.jsonl:7: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["b", "a", "B", "b"], ["B", "a", "b"]),
        ([10, 9, "2"], ["2", "9", "10"]),
        ([10, 9, "x"], ["10", "9", "x"]),
        ([True, False], ["false", "true"]),
    ],
)
def test_labels_are_in_the_order_of_their_names(labels: list[Any], expected: list[str]) -> None:
    for given in (labels, labels[::-1]):
        rows = [understand_labelled(row(text="a", label=label)) for label in given]
        assert labels_in(rows, "x") == expected


def test_one_label_cannot_be_told_apart() -> None:
    with pytest.raises(DataError, match="all rows of x have the label '1'; at least two"):
        labels_in([understand_labelled(row(text="a", label=1))] * 3, "x")


def test_an_unknown_label_is_told_with_the_known_ones() -> None:
    said = understand_labelled(row(text="a", label="cut"))
    with pytest.raises(DataError, match=r"has the label 'cut'; the model knows 'cat', 'dog'\. Did"):
        said.number({"cat": 0, "dog": 1})
    many = {f"n{number}": number for number in range(1000)}
    with pytest.raises(DataError, match=r"'n18', 'n19', \.\.\.") as caught:
        said.number(many)
    assert len(str(caught.value)) < 400


def test_all_tokens_of_a_text_are_read_as_far_as_they_fit() -> None:
    """One that fills the context is not cut, nor is one of a single token left out."""
    encoder, padding = Encoder(tokenizer(), ChatTemplate({})), 299
    texts = {"a": "cat", "b": "the cat sat on the mat", "c": "the cat sat on the mat while rain"}
    known = {name: number for number, name in enumerate(texts)}
    made = [
        encoder.encode_labelled(understand_labelled(row(text=text, label=name)), known, padding)
        for name, text in texts.items()
    ]
    tokens = [tokenizer().encode(text) for text in texts.values()]
    context = len(tokens[1])
    assert len(tokens[0]) < context < len(tokens[2])
    material = ExampleMaterial(Examples(made, "x", 1, "all"), packed=False, padding=padding)
    [batch] = material.held_out(context, 3, None)
    assert batch.row_labels is not None
    assert batch.row_labels.tolist() == [0, 1, 2]
    for inputs, expected in zip(batch.inputs.tolist(), tokens, strict=True):
        wanted = expected[:context]
        assert inputs == wanted + [padding] * (context - len(wanted))
    assert material._held_out(context).cut == 1
    assert material.predicted(context) is None


def test_the_tokenizers_own_tokens_stand_around_a_text() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    from atomtrain.data.tokenizer import Tokenizer

    backend = Backend.from_str(tokenizer().to_json())
    end = tokenizer().separator_text
    number = backend.token_to_id(end)
    backend.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, number)])
    made = Tokenizer(backend)
    text = f"the cat {end}"
    assert made.encode_whole(text) == [number, *made.encode(text)]
    assert number not in made.encode(text), "what a text spells out is not that token"
