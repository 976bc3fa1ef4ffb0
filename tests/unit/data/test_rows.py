"""Rows with answers: all formats, the chat template's marks, packing, mistakes by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atomtrain.data.chat import ChatTemplate, Encoder, Example
from atomtrain.data.corpus import read_corpus
from atomtrain.data.dialogues import (
    Dialogue,
    NoAnswerError,
    Plain,
    is_pair,
    understand,
    understand_judged,
    understand_pair,
)
from atomtrain.data.examples import IGNORED, Examples, Rows, RowSampler, held_out_rows
from atomtrain.data.material import PairMaterial, References
from atomtrain.data.rows import Row, has_rows, read_rows
from atomtrain.data.sampler import SamplerConfig
from atomtrain.errors import DataError
from tests.support.hugging_face_models import tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = {
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>"}),
}
ASK = {"role": "user", "content": "the cat"}
ANSWER = {"role": "assistant", "content": "sat on the mat"}


def row(**values: Any) -> Row:
    return Row("file.jsonl:7", values)


def encoder() -> Encoder:
    return Encoder(tokenizer(), ChatTemplate(FILES))


def answers_of(example: Example) -> str:
    kept = [t for t, a in zip(example.tokens, example.answers, strict=True) if a]
    return tokenizer().decode(kept)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"messages": [ASK, ANSWER]}, "messages"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "the cat"},
                    {"from": "gpt", "value": "sat on the mat"},
                ]
            },
            "sharegpt",
        ),
        ({"instruction": "the", "input": "cat", "output": "sat on the mat"}, "alpaca"),
        ({"prompt": [ASK], "completion": [ANSWER]}, "completion"),
        ({"prompt": "the cat ", "completion": "sat on the mat"}, "completion"),
    ],
)
def test_answers_are_marked_in_every_format(values: dict[str, Any], kind: str) -> None:
    pytest.importorskip("transformers")
    example = encoder().encode(row(**values))
    assert example.kind == kind
    assert answers_of(example) == "sat on the mat<|endoftext|>"
    assert len(example.tokens) == len(example.answers)


def test_every_answer_of_a_dialogue_counts_but_not_those_of_the_prompt() -> None:
    pytest.importorskip("transformers")
    turns = [ASK, ANSWER, {"role": "user", "content": "and"}, {**ANSWER, "content": "the dog"}]
    both = encoder().encode(row(messages=turns))
    assert answers_of(both) == "sat on the mat<|endoftext|>the dog<|endoftext|>"
    last = encoder().encode(row(prompt=turns[:3], completion=turns[3:]))
    assert answers_of(last) == "the dog<|endoftext|>"
    assert last.tokens == both.tokens


def test_text_is_learnt_as_a_whole_and_cannot_forge_the_end() -> None:
    example = encoder().encode(row(text="the cat <|endoftext|> sat"))
    assert all(example.answers)
    assert example.tokens.count(tokenizer().separator) == 1
    assert example.kind == "text"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "has nothing; a row needs messages"),
        ({"words": 1}, "has 'words'"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "the role 'bot'; allowed are"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0] needs a text"),
        ({"messages": [ASK]}, "no message is an assistant's answer"),
        ({"messages": ["the cat"]}, "must be an object"),
        ({"conversations": [{"from": "martian", "value": ""}]}, "from 'martian'; known are"),
        ({"conversations": "x"}, "must be a list of turns"),
        ({"prompt": "x", "completion": 3}, "'completion' must be a text, not int"),
        ({"text": ["x"]}, "'text' must be a text, not list"),
    ],
)
def test_bad_rows_are_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        understand(row(**values))
    assert str(caught.value).startswith("file.jsonl:7: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [ASK]},
        {"messages": [ASK, {**ANSWER, "content": " \n"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
        {"instruction": "x", "output": ""},
        {"instruction": "x", "output": None},
        {"prompt": "x", "completion": " "},
        {"prompt": [ASK], "completion": [{**ANSWER, "content": ""}]},
        {"text": ""},
        {"text": None},
    ],
)
def test_rows_without_an_answer_are_told_from_broken_ones(values: dict[str, Any]) -> None:
    with pytest.raises(NoAnswerError, match=r"^file\.jsonl:7: "):
        understand(row(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "x", "chosen": "", "rejected": "y"},
        {"prompt": "x", "chosen": "y", "rejected": None},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": ""}]},
    ],
)
def test_pairs_that_lack_an_answer_are_told(values: dict[str, Any]) -> None:
    assert is_pair(row(**values))
    with pytest.raises(NoAnswerError):
        understand_pair(row(**values))


def test_a_blank_answer_among_others_is_not_learnt() -> None:
    pytest.importorskip("transformers")
    turns = [ASK, {**ANSWER, "content": ""}, ASK, ANSWER]
    assert answers_of(encoder().encode(row(messages=turns))) == "sat on the mat<|endoftext|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    pytest.importorskip("transformers")
    rewriting = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    made = Encoder(tokenizer(), ChatTemplate({"chat_template.jinja": rewriting}))
    with pytest.raises(DataError, match=r"file.jsonl:7: the chat template renders message 1"):
        made.encode(row(messages=[ASK, ANSWER, ASK, ANSWER]))
    refusing = ChatTemplate({"chat_template.jinja": "{{ raise_exception('no system') }}"})
    with pytest.raises(DataError, match=r"refuses it .*no system"):
        Encoder(tokenizer(), refusing).encode(row(messages=[ASK, ANSWER]))
    with pytest.raises(DataError, match="no chat template"):
        Encoder(tokenizer(), ChatTemplate({})).encode(row(messages=[ASK, ANSWER]))


def test_files_are_read_in_order_and_mistakes_have_their_line(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    spec = str(tmp_path)
    assert has_rows(spec)
    assert [r.values["text"] for r in read_rows(spec)] == ["one", "two", "three"]
    assert [r.place.rpartition(":")[2] for r in read_rows(spec)] == ["1", "1", "3"]
    assert next(r.values["text"] for r in read_rows(str(tmp_path / "*.jsonl"))) == "one"
    assert not has_rows(None)
    assert not has_rows(str(tmp_path / "book.txt"))
    for content, expected in (("{", "not JSON"), ("[1]", "not a JSON object")):
        (tmp_path / "c.jsonl").write_text('{"text": "x"}\n' + content)
        with pytest.raises(DataError, match=rf"c\.jsonl:2: {expected}"):
            list(read_rows(str(tmp_path / "c.jsonl")))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(str(tmp_path / "none.jsonl")))
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_rows(str(tmp_path / "d.jsonl")))


def test_a_json_list_is_rows_as_well(tmp_path: Path) -> None:
    file = tmp_path / "alpaca.json"
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    for content in (json.dumps(rows, indent=1), "\ufeff \n" + json.dumps(rows)):
        file.write_text(content)
        assert has_rows(str(file))
        found = list(read_rows(str(file)))
        assert [r.values for r in found] == rows
        assert found[1].place.endswith("alpaca.json: row 2")
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [r.place.rpartition(":")[2] for r in read_rows(str(file))] == ["1", "2"]
    for content, expected in (("[{}", "not JSON"), ("[{}, 1]", "row 2 is not a JSON object")):
        file.write_text(content)
        with pytest.raises(DataError, match=expected):
            list(read_rows(str(file)))


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
def test_a_table_is_rows_whose_keys_its_first_line_names(
    tmp_path: Path, suffix: str, delimiter: str
) -> None:
    file = tmp_path / f"rows{suffix}"
    long = "word " * 40_000  # more than the csv module takes unless told
    lines = ["\ufeffprompt,completion", '"a, b\tc","two\nlines ""quoted"""', "", f"x,{long}", "y,"]
    file.write_text("\n".join(lines).replace(",", delimiter), encoding="utf-8")
    assert has_rows(str(file))
    found = list(read_rows(str(file)))
    asked = "a, b\tc".replace(",", delimiter)
    assert [r.values for r in found] == [
        {"prompt": asked, "completion": 'two\nlines "quoted"'},
        {"prompt": "x", "completion": long},
        {"prompt": "y", "completion": ""},
    ]
    assert found[1].place.endswith(f"rows{suffix}: row 2")
    assert understand(found[0]) == Plain("completion", asked, 'two\nlines "quoted"')
    with pytest.raises(NoAnswerError, match="row 3: 'completion' is empty"):
        understand(found[2])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "its first line must name every column once"),
        ("text,text\na,b\n", "its first line must name every column once"),
        ("text,\na,b\n", "its first line must name every column once"),
        ("text\na\nb,c\n", "row 2 has 2 cells, the first line names 1 columns"),
        ("prompt,completion\na\n", "row 1 has 1 cells, the first line names 2"),
        ('text\n"a\n', "not a table"),
    ],
)
def test_what_is_not_a_table_is_told(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=expected):
        list(read_rows(str(tmp_path / "a.csv")))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.ndjson", "a.CSV", "a.parquet"])
def test_rows_are_never_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "book.txt").write_text("the cat sat\n" * 1000)
    read_corpus(str(tmp_path))
    begins = "PAR1" if name.endswith("parquet") else ""
    (tmp_path / name).write_text(begins + "text\n" * 1000)
    for spec in (str(tmp_path), f"{tmp_path / 'book.txt'},{tmp_path / name}"):
        assert not has_rows(spec)
        with pytest.raises(DataError, match=rf"{name} holds rows.*hold text; name one kind"):
            read_corpus(spec)
    read_corpus(str(tmp_path / "*.txt"))


def test_settings_in_json_among_code_are_text(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("print(1)\n" * 1000)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    assert len(read_corpus(str(tmp_path)).documents) == 2


def test_what_lies_beside_the_rows_of_a_folder_is_passed_over(tmp_path: Path) -> None:
    for name in ("README.md", "dataset_infos.json", ".git/config", ".gitattributes", "a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}')
    assert has_rows(str(tmp_path))
    assert len(list(read_rows(str(tmp_path)))) == 1
    (tmp_path / "book.txt").write_text("two")
    assert not has_rows(str(tmp_path))
    assert has_rows(str(tmp_path / "*.jsonl"))


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": [ASK, ANSWER]}, {"messages": [ASK, {**ANSWER, "content": "x"}]}]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    found = list(read_rows(str(file)))
    assert [r.values for r in found] == rows
    assert found[1].place.endswith("row 2")
    assert isinstance(understand(found[0]), Dialogue)
    assert isinstance(understand(row(text="x")), Plain)
    file.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        list(read_rows(str(file)))


def some(count: int, length: int = 5) -> list[Example]:
    """Examples whose tokens are their number; the last two count."""
    marks = [False] * (length - 2) + [True] * 2
    return [Example("text", [n] * length, marks, 7) for n in range(count)]


def test_rows_are_padded_and_count_answers_only() -> None:
    examples = Examples(some(41), "x")
    assert examples.held_out.tokens.tolist() == [10] * 5 + [30] * 5
    assert examples.counts.examples == 41
    assert examples.counts.answer_tokens == 82
    rows = Rows(examples.train, 8, packed=False, padding=99)
    batch = rows.batch([0, 3])
    assert batch.inputs.tolist() == [[0] * 5 + [99] * 3, [3] * 5 + [99] * 3]
    assert batch.labels.tolist()[1] == [IGNORED, IGNORED, 3, 3] + [IGNORED] * 4
    assert len(rows) == 39
    cut = Rows(examples.train, 3, packed=False, padding=99)
    assert cut.cut == 39
    assert cut.batch([0]).labels.tolist() == [[IGNORED, IGNORED, 0]]
    with pytest.raises(DataError, match="raise --context"):
        Rows(examples.train, 2, packed=False, padding=99)
    with pytest.raises(DataError, match="at least 2 are needed"):
        Examples(some(1), "x")
    assert Examples(some(2), "x").held_out.count == 1


def test_packing_loses_and_mixes_nothing() -> None:
    examples = Examples(some(40), "x")
    rows = Rows(examples.train, 12, packed=True, padding=99)
    assert len(rows) < 39
    assert sorted(index for row in rows.rows for index in row) == list(range(38))
    whole = rows.batch(range(len(rows)))
    assert int((whole.labels != IGNORED).sum()) == 2 * 38
    counted = whole.labels != IGNORED
    assert torch.equal(whole.inputs[counted], whole.labels[counted])
    assert whole.documents is not None
    for inputs, documents in zip(whole.inputs, whole.documents, strict=True):
        # Tokens are the number of their example, so each example is one document.
        begins = inputs[1:] != inputs[:-1]
        assert torch.equal(documents[1:] - documents[:-1], begins.long())


def test_rows_with_one_example_tell_documents_where_training_does() -> None:
    train = Examples(some(4), "x").train
    alone = Rows(train, 8, packed=False, padding=99, separate=True).batch([0])
    assert alone.documents is not None
    assert alone.documents.tolist() == [[0] * 5 + [1] * 3]
    assert Rows(train, 8, packed=False, padding=99).batch([0]).documents is None


def test_the_order_is_a_function_of_seed_peer_and_position() -> None:
    rows = Rows(Examples(some(12), "x").train, 4, packed=False, padding=99)
    config = SamplerConfig(context_tokens=4, sequences=3, seed=1)
    one, again, other = (RowSampler(rows, config, key) for key in ("a", "a", "b"))
    epoch = torch.cat([one.batch(p).inputs[:, 0] for p in range(4)]).tolist()[:11]
    assert sorted(epoch) == sorted(np.unique([r for r in range(12) if r != 10]).tolist())
    assert torch.equal(one.batch(5).inputs, again.batch(5).inputs)
    assert not all(torch.equal(one.batch(p).inputs, other.batch(p).inputs) for p in range(4))
    assert one.epoch(11) == 3.0
    held = list(held_out_rows(rows, 4))
    assert [tuple(b.inputs.shape) for b in held] == [(4, 4), (4, 4)]
    assert rows.predicted() == (2 * 11, 7 * 11)


USER = {"role": "user", "content": "the cat"}
OTHER = {"role": "assistant", "content": "lay by the door"}


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "lay by the door"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "the cat", "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
    ],
    ids=["texts", "messages", "text and messages", "whole dialogues"],
)
def test_pairs_have_both_answers_behind_the_prompt(values: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    chosen, rejected = encoder().encode_pair(row(**values))
    assert (answers_of(chosen), answers_of(rejected)) == (
        "sat on the mat<|endoftext|>", "lay by the door<|endoftext|>",
    )  # fmt: skip
    before = chosen.answers.index(True)
    assert before == rejected.answers.index(True) > 0
    assert chosen.tokens[:before] == rejected.tokens[:before]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": "x", "completion": "y"}, "has 'prompt', 'completion'; answers are compared"),
        ({"prompt": "x", "chosen": "y"}, "rows that all have chosen and"),
        ({"prompt": [USER], "chosen": "y", "rejected": "z"}, "'chosen' must be one as well"),
        ({"chosen": [ANSWER], "rejected": "z"}, "must both be texts, or both lists"),
        ({"chosen": 1, "rejected": 2}, "'chosen' must be a list of messages"),
        ({"chosen": [USER], "rejected": [OTHER]}, "no message is an assistant's answer"),
    ],
)
def test_bad_pairs_are_named(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder().encode_pair(row(**values))
    assert str(caught.value).startswith("file.jsonl:7: ")
    assert expected in str(caught.value)


def test_judged_answers_have_one_of_another_row_beside_them() -> None:
    said = [("a", "x", True), ("b", "y", False), ("c", "z", True)]
    rows = [row(prompt=f"{p} ", completion=c, label=good) for p, c, good in said]
    made = list(encoder().encode_judged(map(understand_judged, rows)))
    texts = [tokenizer().decode(example.tokens) for example in made]
    end = "<|endoftext|>"
    assert texts == [f"{t}{end}" for t in ("a x", "a y", "b y", "b x", "c z", "c y")]
    assert [example.label for example in made] == [1, 1, 0, 0, 1, 1]
    material = PairMaterial(Examples(made, "x", 2, "none"), 0)
    batch = material.train(16).batch([1, 2])
    assert batch.row_labels is not None
    assert batch.row_labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(DataError, match="fewer than 2 rows"):
        list(encoder().encode_judged(map(understand_judged, rows[:1])))
    messages = row(prompt=[USER], completion=[ANSWER], label=True)
    with pytest.raises(DataError, match=r"has texts where .* has messages"):
        list(encoder().encode_judged(map(understand_judged, [rows[0], messages])))


def test_answers_of_a_pair_stay_together() -> None:
    def example(n: int, length: int) -> Example:
        return Example("preference", [n] * length, [False] + [True] * (length - 1), length)

    lengths = [(3, 3), (3, 9), (2, 3), *[(3, 3)] * 20]
    made = [example(2 * n + i, pair[i]) for n, pair in enumerate(lengths) for i in (0, 1)]
    made[1] = example(1, 9)._replace(answers=[False] * 8 + [True])
    examples = Examples(made, "pairs", together=2)
    assert (examples.train.count, examples.held_out.count) == (44, 2)
    material = PairMaterial(examples, padding=0)
    rows = material.train(4)
    assert (len(rows), rows.dropped, rows.cut) == (21, 1, 2)
    batch = rows.batch([0, 1])
    assert batch.inputs[:, 0].tolist() == [2, 3, 4, 5]
    assert batch.reference is None
    references = References(np.arange(42, dtype=np.float32), np.zeros(2, np.float32))
    known = material._replace(references=references)
    sampler = known.sampler(SamplerConfig(context_tokens=4, sequences=6, seed=3), "peer")
    seen = [sampler.batch(position) for position in range(7)]
    for batch in seen:
        first = batch.inputs[:, 0]
        assert torch.equal(first[1::2], first[0::2] + 1)
        assert batch.reference is not None
        places = first - 2 - 2 * (first > 20).long()  # the first pair was dropped, one is held out
        assert torch.equal(batch.reference, places.float())
    assert len({int(n) for batch in seen for n in batch.inputs[:, 0]}) == 42
    [judged] = known.held_out(4, 2, None)
    assert judged.inputs[:, 0].tolist() == [20, 21]
    with pytest.raises(DataError, match="pairs has 1 examples, at least 2"):
        Examples(made[:2], "pairs", together=2)
    few = Examples(made[2:6], "pairs", together=2)
    assert (few.train.count, few.held_out.count) == (2, 2)


def test_a_json_list_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.data.rows._READ_CHARACTERS", 3)
    rows = [{"text": "a]b" * n, "n": [n, {"m": "\u00fc"}]} for n in range(20)]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows, indent=1) + "\n ")
    assert [row.values for row in read_rows(str(file))] == rows
    file.write_text(" [ ] ")
    assert list(read_rows(str(file))) == []
    for wrong in ('[{"a": 1} {"a": 2}]', '[{"a": 1}', '[{"a": 1}] x', "[,]", '[{"a": 1},]'):
        file.write_text(wrong)
        with pytest.raises(DataError, match=r"row \d is not JSON"):
            list(read_rows(str(file)))


def test_what_was_said_before_is_read() -> None:
    """A system prompt beside turns, and the turns before an instruction."""
    turns = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]
    said = understand(row(conversations=turns, system="Be brief."))
    assert isinstance(said, Dialogue)
    assert [message["role"] for message in said.messages] == ["system", "user", "assistant"]
    said = understand(
        row(instruction="third", output="3", history=[["first", "1"], ["second", "2"]])
    )
    assert isinstance(said, Dialogue)
    assert [message["content"] for message in said.messages] == [
        "first", "1", "second", "2", "third", "3",
    ]  # fmt: skip
    for wrong in ("first", [["first"]], [["first", 1]]):
        with pytest.raises(DataError, match="'history' must be a list of pairs of texts"):
            understand(row(instruction="third", output="3", history=wrong))


def test_answers_of_weight_0_are_not_learnt() -> None:
    pytest.importorskip("transformers")
    messages = [ASK, {**ANSWER, "weight": 0}, ASK, {**ANSWER, "content": "ran", "weight": 1}]
    assert answers_of(encoder().encode(row(messages=messages))) == "ran<|endoftext|>"
    with pytest.raises(NoAnswerError):
        encoder().encode(row(messages=messages[:2]))
    with pytest.raises(DataError, match=r"messages\[1\] has the weight 0.5; allowed are 0"):
        understand(row(messages=[ASK, {**ANSWER, "weight": 0.5}]))


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "reasoning_content", "thinking"])
def test_what_messages_say_beside_their_content_is_not_lost_in_silence(name: str) -> None:
    with pytest.raises(DataError, match=rf"messages\[1\] has {name}, which is not read"):
        understand(row(messages=[ASK, {**ANSWER, name: "something"}]))
    understand(row(messages=[ASK, {**ANSWER, name: None}]))


def test_tools_are_not_lost_in_silence() -> None:
    for nothing in (None, [], "", "[]"):
        understand(row(messages=[ASK, ANSWER], tools=nothing))
    with pytest.raises(DataError, match="has tools, which are not read"):
        understand(row(messages=[ASK, ANSWER], tools=[{"name": "search"}]))
