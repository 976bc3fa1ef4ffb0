"""Classifiers and reward models by the real commands, on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.events import read_events
from atomtrain.training.setup.state import open_trained
from tests.support.hugging_face_models import UNTIED, saved_tensors, write_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
TEXTS = ("the cat sat on the mat", "rain fell on the roof", "the dog lay by the door")
LABELS = ("cat", "rain", "dog")
OPTIONS = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "1MiB",
    "--context", "24", "--sequences", "8", "--micro-batch", "4", "--plain", "--no-profile",
    "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "4", "--seed", "1",
    "--precision", "fp32", "--learning-rate", "0.003",
]  # fmt: skip
LORA = ("--lora", "r=4,alpha=8")


def labelled(count: int = 60) -> list[dict[str, Any]]:
    return [
        {"text": f"{TEXTS[n % 3]} {'while' * (n % 5)}", "label": LABELS[n % 3]}
        for n in range(count)
    ]


def pairs(count: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt": "the dog ", "chosen": TEXTS[0][: 9 + n % 7], "rejected": TEXTS[1][: 8 + n % 5]}
        for n in range(count)
    ]


def write_rows(file: str, rows: list[dict[str, Any]]) -> None:
    Path(file).write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", UNTIED)
    write_rows("rows.jsonl", labelled())
    write_rows("pairs.jsonl", pairs())
    return tmp_path


def train(objective: str, *more: str) -> list[dict[str, Any]]:
    data = "rows.jsonl" if objective == "classify" else "pairs.jsonl"
    given = ["--model", "model", "--data", data, "--objective", objective]
    given = [] if "--resume" in more else given
    assert main(["train", "--run", "mine", *given, *OPTIONS, *more]) == 0
    return list(read_events(Path("runs/mine/peer-0/events.jsonl")))


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def logits_of_export(folder: str, ids: torch.Tensor) -> torch.Tensor:
    """Return what transformers says with the exported folder."""
    from transformers import AutoModelForSequenceClassification

    load: Any = AutoModelForSequenceClassification.from_pretrained
    with torch.no_grad():
        logits: torch.Tensor = load(folder).eval()(ids).logits
    return logits


def texts_padded() -> torch.Tensor:
    ids = torch.randint(1, 280, (4, 12), generator=torch.Generator().manual_seed(0))
    ids[1, 7:] = ids[2, 3:] = 0  # <|endoftext|>, since the model names no padding
    return ids


@pytest.mark.parametrize("more", [(), LORA], ids=["whole", "adapters"])
def test_a_classifier_learns_and_is_exported_with_its_labels(
    more: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = train("classify", "--steps", "12", *more)
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert last["loss"] < first["loss"]
    assert last["accuracy"] == 1.0 > first["accuracy"]
    assert "perplexity" not in last
    assert kinds(events, "step")[-1]["accuracy"] == 1.0
    assert not kinds(events, "sample"), "it continues no text"
    told = capsys.readouterr().out
    assert "accuracy   100.0% of held-out texts" in told
    assert "nats per text" in told

    assert main(["evaluate", "runs/mine/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["accuracy"], found["texts"]) == (1.0, 3)
    assert main(["evaluate", "runs/mine/peer-0"]) == 0
    assert "accuracy        100.0% of 3 texts" in capsys.readouterr().out
    assert main(["generate", "runs/mine/peer-0"]) == 2
    assert "continues none" in capsys.readouterr().err

    if more:
        assert main(["export", "runs/mine/peer-0", "exported"]) == 2
        assert "with --merge" in capsys.readouterr().err
    merge = ["--merge"] if more else []
    assert main(["export", "runs/mine/peer-0", "exported", *merge]) == 0
    config = json.loads(Path("exported/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "cat", "1": "dog", "2": "rain"}
    assert config["label2id"] == {"cat": 0, "dog": 1, "rain": 2}
    assert (config["num_labels"], config["pad_token_id"]) == (3, 0)
    ids = texts_padded()
    with torch.no_grad():
        expected = open_trained(Path("runs/mine/peer-0")).model(ids).logits
    assert torch.equal(logits_of_export("exported", ids), expected)
    capsys.readouterr()
    assert main(["evaluate", "exported", "--data", "rows.jsonl", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["loss"] == pytest.approx(found["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("objective", "more"),
    [("reward", ()), ("classify", (LORA[0], LORA[1] + ",bits=8"))],
    ids=["whole", "adapters"],
)
def test_a_resumed_run_goes_on_with_the_same_bits(
    objective: str, more: tuple[str, ...], place: Path
) -> None:
    train(objective, "--steps", "8", *more)
    folder = place / "runs" / "mine" / "peer-0"
    expected = saved_tensors(folder)
    assert "score.weight/parameter" in expected
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    if not more:
        shutil.rmtree(place / "model")  # nobody asks for it again
    train(objective, "--resume")
    found = saved_tensors(folder)
    assert set(expected) == set(found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_reward_model_learns_which_answer_is_better(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = train("reward", "--steps", "8")
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert last["loss"] < first["loss"]
    assert last["reward_accuracy"] == 1.0
    assert last["reward_margin"] > first["reward_margin"]
    capsys.readouterr()
    assert main(["evaluate", "runs/mine/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reward_accuracy"], found["pairs"]) == (1.0, 2)
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert main(["export", "runs/mine/peer-0", "exported"]) == 0
    ids = texts_padded()
    with torch.no_grad():
        expected = open_trained(Path("runs/mine/peer-0")).model(ids).logits
    assert expected.shape == (4, 1)
    assert torch.equal(logits_of_export("exported", ids), expected)
    capsys.readouterr()
    assert main(["evaluate", "exported", "--data", "pairs.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(found["loss"], abs=1e-6)
    assert main(["evaluate", "runs/mine/peer-0", "--data", "rows.jsonl"]) == 2
    assert "answers are compared in rows that all have chosen" in capsys.readouterr().err
    # It is trained further, and only for what its head says.
    more = ["train", "--model", "exported", "--steps", "1", *OPTIONS]
    assert main([*more, "--data", "pairs.jsonl", "--objective", "reward", "--run", "two"]) == 0
    events = list(read_events(Path("runs/two/peer-0/events.jsonl")))
    assert kinds(events, "evaluation")[0]["loss"] == pytest.approx(last["loss"], abs=1e-5)
    capsys.readouterr()
    assert main([*more, "--data", "rows.jsonl", "--objective", "classify"]) == 2
    assert "has a head of 1 output on a sequence" in capsys.readouterr().err


def test_a_trained_head_keeps_its_labels(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("classify", "--steps", "12")
    assert main(["export", "runs/mine/peer-0", "exported"]) == 0
    write_rows("more.jsonl", [row for row in labelled() if row["label"] != "cat"])
    given = ["train", "--model", "exported", "--objective", "classify", *OPTIONS, "--steps", "1"]
    assert main([*given, "--data", "more.jsonl", "--run", "more"]) == 0
    events = list(read_events(Path("runs/more/peer-0/events.jsonl")))
    assert kinds(events, "evaluation")[0]["accuracy"] == 1.0, "it knows already"
    sizes = open_checkpoint(Path("runs/more/peer-0")).meta["recipe"]["sizes"]
    assert sizes["config"]["id2label"] == {"0": "cat", "1": "dog", "2": "rain"}
    write_rows("bird.jsonl", [*labelled(), {"text": "a", "label": "rainy"}])
    capsys.readouterr()
    assert main([*given, "--data", "bird.jsonl", "--run", "bird"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "bird.jsonl:61: has the label 'rainy'; the model knows 'cat', 'dog', 'rain'." in line
    assert "Did you mean 'rain'?" in line
    assert main([*given, "--data", "rows.jsonl", "--objective", "next-token"]) == 2
    assert "has a head of 3 outputs on a sequence" in capsys.readouterr().err
    size = ["--micro-batch", "1", "--tokens-per-step", "48"]
    assert main(["plan", "exported", "--gpu", "rtx-3090", "--context", "24", *size]) == 0


def test_a_dry_run_tells_labels_and_rows_without_one_are_skipped(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = [{"text": " ", "label": "cat"}, {"text": "a", "label": None}]
    write_rows("rows.jsonl", [*labelled(), *empty])
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + '\n{"text":"a","label":NaN}\n')
    given = ["--model", "model", "--data", "rows.jsonl", "--objective", "classify", *OPTIONS]
    assert main(["train", "--dry-run", *given]) == 0
    told = capsys.readouterr().out
    assert "'cat', 'dog', 'rain'" in told
    assert "3 of 63 rows of rows.jsonl lack a text or a label and are skipped" in told
    assert "rows.jsonl:61: 'text' is empty" in told
    assert not Path("runs").exists()


MISTAKES = {
    "packed": (["--packing"], [], "--objective classify every text has its own"),
    "preset": (["--model", "tiny"], [], "name its folder with --model"),
    "no labels": ([], [{"text": "a"}] * 3, "bad.jsonl:1: has 'text'; classes are learnt from"),
    "none has one": ([], [{"text": "a", "label": None}] * 3, "none of the 3 rows of bad.jsonl has"),
    "one label": ([], [{"text": "a", "label": 1}] * 3, "all rows of bad.jsonl have the label '1'"),
    "half": ([], [{"text": "a", "label": 0.5}] * 3, "must be a text or a whole number, not 0.5"),
    "column": ([], [*labelled(2), {"text": "a"}], "bad.jsonl:3: has 'text'; classes are learnt"),
    "text": ([], [*labelled(2), {"text": 1, "label": "a"}], "bad.jsonl:3: 'text' must be a text"),
    "running text": (["--data", "book.txt"], [], "classes are learnt from rows with text and lab"),
    "validation": (["--validation", "bad.jsonl"], [{"text": "a", "label": "b"}] * 2,
                   "bad.jsonl:1: has the label 'b'; the model knows 'cat', 'dog', 'rain'"),
    "beta": (["--beta", "1"], [], "--beta belongs to"),
    "encoder": (["--model", "bert"], [], "does not classify by a linear layer 'score'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, rows, expected = MISTAKES[name]
    Path("book.txt").write_text("the cat sat\n" * 99)
    write_rows("bad.jsonl", rows)
    if name == "encoder":
        shutil.copytree("model", "bert")
        bert = {**UNTIED, "model_type": "bert", "is_decoder": True}
        Path("bert/config.json").write_text(json.dumps(bert))
    if rows and not more:
        more = ["--data", "bad.jsonl"]
    given = ["--model", "model", "--data", "rows.jsonl", "--objective", "classify", *OPTIONS]
    if more[:1] in (["--data"], ["--model"]):
        at = given.index(more[0])
        del given[at : at + 2]
    assert main(["train", "--run", "mine", *given, *more]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
    assert not (place / "runs" / "mine" / "peer-0").exists()
