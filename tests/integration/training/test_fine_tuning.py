"""Fine-tuning by the real commands, on a tiny model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.main import main
from atomtrain.events import read_events
from tests.support.hugging_face_models import SENTENCE, UNTIED, write_model, write_text

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
SMALL = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "3MiB",
    "--context", "32", "--sequences", "4", "--steps", "4", "--plain", "--no-profile",
    "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "100",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a text and rows, as the page's commands name them."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "smollm2-135m"
    write_model(folder, UNTIED)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "books").mkdir()
    write_text(tmp_path / "books" / "one.txt")
    words = SENTENCE.split()
    rows = []
    for n in range(40):
        asked = {"role": "user", "content": " ".join(words[n % 7 : n % 7 + 3])}
        answer = {"role": "assistant", "content": " ".join(words[n % 5 : n % 5 + 6])}
        rows.append(json.dumps({"messages": [asked, answer]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_an_evaluation_is_that_of_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--model", "models/smollm2-135m", "--data", "chats.jsonl", "--run", "chat"]
    assert main([*train, *SMALL, "--packing"]) == 0
    events = read_events(place / "runs" / "chat" / "peer-0" / "events.jsonl")
    last = [event for event in events if event["event"] == "evaluation"][-1]
    capsys.readouterr()
    assert main(["evaluate", "runs/chat/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert found["bits_per_byte"] == pytest.approx(last["bits_per_byte"], abs=1e-5)
    assert main(["evaluate", "models/smollm2-135m", "--data", "chats.jsonl", "--context", "32",
                 "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["loss"] > found["loss"]
    assert main([*train, "--resume", *SMALL, "--steps", "5"]) == 0


def test_packing_is_refused_for_a_model_that_carries_a_state(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    carrying = {
        **UNTIED, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]
    }  # fmt: skip
    write_model(place / "models" / "carrying", carrying)
    train = ["train", "--model", "models/carrying", "--data", "books", "--run", "carried", *SMALL]
    capsys.readouterr()
    assert main([*train, "--packing"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "carrying does not keep documents that share a sequence apart" in line
    assert "train it without --packing" in line
    assert not (place / "runs" / "carried").exists()


def test_rows_without_an_answer_are_skipped_and_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (place / "chats.jsonl").read_text().splitlines()
    empty = json.dumps({"messages": [{"role": "user", "content": "the cat"}]})
    (place / "some.jsonl").write_text("\n".join([*lines[:3], empty, *lines[3:], empty]))
    train = ["train", "--model", "models/smollm2-135m", *SMALL]
    assert main([*train, "--data", "some.jsonl", "--run", "some"]) == 0
    told = "2 of 42 rows of some.jsonl have no answer and are skipped (the first: some.jsonl:4"
    assert capsys.readouterr().out.count(told) == 1
    events = read_events(place / "runs" / "some" / "peer-0" / "events.jsonl")
    (warning,) = [event for event in events if event["event"] == "warning"]
    assert warning["skipped_rows"] == 2
    given = ["data", "inspect", "--model", "models/smollm2-135m", "--context", "64", "--json"]
    counts = []
    for data in ("some.jsonl", "chats.jsonl"):
        assert main([*given, data]) == 0
        counts.append(json.loads(capsys.readouterr().out))
    assert counts[0] == {**counts[1], "skipped_rows": 2}
    (place / "none.jsonl").write_text(f"{empty}\n{empty}\n")
    assert main([*train, "--data", "none.jsonl", "--run", "none"]) == 2
    assert "none of the 2 rows of none.jsonl has an answer" in capsys.readouterr().err


def test_a_table_is_trained_on_as_the_same_rows_in_json_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = SENTENCE.split()
    rows = [
        {"prompt": f"{words[n % 7]}, ", "completion": words[n % 5] + " sat"} for n in range(40)
    ]  # fmt: skip
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, delimiter in (("rows.csv", ","), ("rows.tsv", "\t")):
        with (place / name).open("w", newline="") as file:
            table = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
    losses = []
    for name in ("rows.jsonl", "rows.csv", "rows.tsv"):
        train = ["train", "--model", "models/smollm2-135m", "--data", name, "--run", name, *SMALL]
        assert main(train) == 0
        events = read_events(place / "runs" / name / "peer-0" / "events.jsonl")
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert losses[0] == losses[1] == losses[2]
    capsys.readouterr()
    assert main(["train", "--model", "tiny", "--data", "rows.csv", *SMALL]) == 2
    assert "is of kind 'completion', which needs a trained model" in capsys.readouterr().err


def test_inspecting_shows_what_is_learnt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["data", "inspect", "chats.jsonl", "--model", "models/smollm2-135m", "--context", "120"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 40
    assert found["held_out"] == 2
    assert found["kinds"] == {"messages": 40}
    assert found["answer_tokens"] < found["tokens"]
    assert found["samples"][0].endswith("[[the cat sat on the mat<|endoftext|>]]")
    assert main([*given, "--packing", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["sequences"] < found["sequences"]
    assert packed["filled_share"] > found["filled_share"]
    (place / "chats.jsonl").write_text('{"messages": []}\n')
    assert main(given) == 2
    assert "chats.jsonl:1: 'messages' must be a list" in capsys.readouterr().err
    assert main(["data", "inspekt"]) == 2
    assert "Did you mean 'inspect'" in capsys.readouterr().err


def test_every_kind_of_data_can_be_looked_at(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows as lines, a list, parquet, a folder of it with what lies beside, by name."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    (place / "chats.json").write_text(json.dumps(rows, indent=1))
    (place / "table" / "data").mkdir(parents=True)
    (place / "table" / "README.md").write_text("# Chats\n")
    for number in range(2):
        part = pyarrow.Table.from_pylist(rows[20 * number : 20 * number + 20])
        parquet.write_table(part, place / "table" / "data" / f"train-{number:05}-of-00002.parquet")

    def inspected(data: str, model: str = "models/smollm2-135m") -> dict[str, Any]:
        given = ["data", "inspect", data, "--model", model, "--context", "64", "--json"]
        assert main(given) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    expected = inspected("chats.jsonl")
    for data in ("chats.json", "table", "table/data/*.parquet"):
        assert inspected(data) == expected, data
    text = inspected("books", "tiny")
    assert (text["kind"], len(text["samples"])) == ("text", 1)
    assert text["train_bytes"] < (place / "books" / "one.txt").stat().st_size
    assert inspected("books")["train_tokens"] > 0


def test_a_data_set_is_trained_on_by_name(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (place / "mine").mkdir()
    (place / "chats.jsonl").rename(place / "mine" / "train.jsonl")
    given = ["--model", "models/smollm2-135m", "--context", "64"]
    assert main(["data", "inspect", "stream:mine:train[:30]", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 30
    train = ["train", *given[:2], *SMALL]
    assert main([*train, "--data", "datasets:mine", "--run", "named"]) == 0
    losses = [
        event["loss"]
        for event in read_events(place / "runs" / "named" / "peer-0" / "events.jsonl")
        if event["event"] == "evaluation"
    ]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    assert main([*train, "--data", "datasets:", "--run", "other"]) == 2
    assert "is not written as datasets:NAME" in capsys.readouterr().err


def test_rows_with_answers_need_a_trained_model(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--model", "tiny", "--data", "chats.jsonl", *SMALL]
    assert main(given) == 2
    assert "chats.jsonl:1: is of kind 'messages', which needs a trained model" in (
        capsys.readouterr().err
    )
