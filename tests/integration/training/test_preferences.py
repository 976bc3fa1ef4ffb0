"""Learning from pairs of answers by the real commands, on a tiny model."""

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
from atomtrain.training.setup.references import REFERENCES_FILE
from tests.support.hugging_face_models import UNTIED, saved_tensors, write_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
GOOD, BAD = "the cat sat on the mat", "rain fell on the roof"
OPTIONS = [
    "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--device-memory", "2MiB",
    "--context", "32", "--sequences", "8", "--micro-batch", "4", "--plain", "--no-profile",
    "--threads", "1", "--evaluate-every", "100", "--checkpoint-every", "2", "--seed", "1",
]  # fmt: skip


def pairs(count: int = 40) -> list[dict[str, Any]]:
    asked = ("the dog", "by the door", "while", "and the cat")
    return [
        {"prompt": f"{asked[n % 4]} ", "chosen": GOOD[: 9 + n % 7], "rejected": BAD[: 8 + n % 5]}
        for n in range(count)
    ]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", UNTIED)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs())))
    return tmp_path


def train(run: str, *more: str) -> list[dict[str, Any]]:
    given = ["--objective", "dpo", "--data", "pairs.jsonl", "--learning-rate", "0.003", *OPTIONS]
    resumed = "--resume" in more
    given = OPTIONS if resumed else ["--model", "model", *given]
    assert main(["train", "--run", run, *given, *more]) == 0
    return list(read_events(Path("runs") / run / "peer-0" / "events.jsonl"))


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_the_better_answer_becomes_the_preferred_one(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = train("mine", "--steps", "6", "--beta", "0.5")
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)  # log 2: nothing is preferred yet
    assert (first["reward_margin"], first["reward_accuracy"]) == (0.0, 0.0)
    assert last["loss"] < first["loss"]
    assert last["reward_accuracy"] == 1.0
    assert last["reward_margin"] > 0.0
    assert "perplexity" not in last
    steps = kinds(events, "step")
    assert steps[-1]["reward_margin"] > steps[0]["reward_margin"] == 0.0
    told = capsys.readouterr().out
    assert "preferred 100.0%" in told
    assert "nats per pair" in told

    assert main(["evaluate", "runs/mine/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert found["reward_accuracy"] == last["reward_accuracy"]
    assert found["pairs"] == 2
    assert main(["evaluate", "runs/mine/peer-0"]) == 0
    assert "preferred       100.0% of 2 pairs" in capsys.readouterr().out
    assert main(["evaluate", "model", "--data", "pairs.jsonl"]) == 2
    assert "model is not one" in capsys.readouterr().err
    assert main(["export", "runs/mine/peer-0", "exported"]) == 0

    def refuse(*_: Any) -> None:
        raise AssertionError("what was asked of the reference is kept")

    monkeypatch.setattr("atomtrain.training.setup.references._Asked.of", refuse)
    train("mine", "--resume", "--steps", "7")
    monkeypatch.undo()
    monkeypatch.chdir(place)

    # A recipe holds it as well.
    (place / "mine.yaml").write_text("model: model\ndata: pairs.jsonl\nobjective: dpo\nbeta: 2\n")
    assert main(["train", "mine.yaml", "--run", "two", "--steps", "1", *OPTIONS]) == 0
    saved = open_checkpoint(Path("runs/two/peer-0")).meta["recipe"]
    assert (saved["objective"], saved["beta"]) == ("dpo", 2.0)


@pytest.mark.usefixtures("place")
def test_two_devices_learn_the_same_from_pairs_as_one() -> None:
    """Each asks about, and learns from, half of a step's pairs."""
    one = train("one", "--steps", "3")
    two = train("two", "--steps", "3", "--device", "emulated:4GiB/s,emulated:4GiB/s")
    for kind in ("step", "evaluation"):
        names = ("loss", "reward_accuracy", "reward_margin")
        told = [[[e[n] for n in names] for e in kinds(run, kind)] for run in (one, two)]
        assert told[0] == told[1]
        assert told[0]


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_some_objectives_need_no_reference(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = train("mine", "--steps", "6", "--objective", name)
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert last["loss"] < first["loss"]
    assert last["reward_margin"] > first["reward_margin"]
    folder = place / "runs" / "mine" / "peer-0"
    assert not (folder / REFERENCES_FILE).exists()
    recipe = open_checkpoint(folder).meta["recipe"]
    assert (recipe["beta"], recipe["gamma"]) == ({"simpo": 2.0, "orpo": 0.1}[name], 1.0)
    shutil.rmtree(place / "model")  # nobody asks for it again
    train("mine", "--resume", "--steps", "7")
    capsys.readouterr()
    assert main(["evaluate", "runs/mine/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = kinds(list(read_events(folder / "events.jsonl")), "evaluation")[-1]
    assert found["loss"] == pytest.approx(again["loss"], abs=1e-5)
    assert found["reward_margin"] == pytest.approx(again["reward_margin"], abs=1e-5)


@pytest.mark.parametrize("more", [(), ("--lora", "r=4,alpha=8,bits=8")], ids=["whole", "adapters"])
def test_a_resumed_run_goes_on_with_the_same_references_and_bits(
    more: tuple[str, ...], place: Path
) -> None:
    train("mine", "--steps", "4", *more)
    folder = place / "runs" / "mine" / "peer-0"
    expected = saved_tensors(folder)
    shutil.rmtree(max((folder / "checkpoints").glob("step-*")))
    references = (folder / REFERENCES_FILE).read_bytes()
    (folder / REFERENCES_FILE).unlink()  # made again, of the model as it was before the first step
    train("mine", "--resume")
    assert (folder / REFERENCES_FILE).read_bytes() == references
    found = saved_tensors(folder)
    assert set(expected) == set(found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_inspecting_shows_both_answers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["data", "inspect", "pairs.jsonl", "--model", "model", "--context", "32"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["held_out"], found["kinds"]) == (40, 2, {"preference": 40})
    assert (found["sequences"], found["dropped"]) == (76, 0)
    assert found["samples"] == [
        "chosen: the dog [[the cat s<|endoftext|>]]", "rejected: the dog [[rain fel<|endoftext|>]]",
    ]  # fmt: skip
    assert main([*given[:-1], "2"]) == 2
    assert "within 2 tokens; raise --context" in capsys.readouterr().err


def test_pairs_of_several_sources_are_compared_with_the_model_before(place: Path) -> None:
    for name, count in (("more", 9), ("own", 3)):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs(count))))
    named = ["--data", "more.jsonl:2", "--validation", "own.jsonl"]
    events = train("several", *named, "--steps", "2")
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4), "each pair has its own reference"
    assert last["reward_margin"] != 0.0
    (laid,) = kinds(events, "data")
    assert (laid["rows"], laid["sequences"]) == (49, 98), "none is held out"
    train("several", "--resume", "--steps", "3")


def judged(count: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if n % 3 else "chosen"],
         "label": n % 3 == 0}
        for n, row in enumerate(pairs(count))
    ]  # fmt: skip


def test_judged_answers_become_more_probable_if_they_are_good(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "judged.jsonl").write_text("\n".join(map(json.dumps, judged())))
    kto = ["--objective", "kto", "--beta", "0.5"]
    given = ["--model", "model", "--data", "judged.jsonl", "--learning-rate", "0.003", *OPTIONS]
    assert main(["train", "--run", "whole", *given, *kto, "--steps", "4"]) == 0
    events = list(read_events(Path("runs/whole/peer-0/events.jsonl")))
    first, last = (kinds(events, "evaluation")[n] for n in (0, -1))
    assert first["loss"] == 0.5  # nothing has changed yet
    assert last["loss"] < first["loss"]
    assert last["reward_margin"] > 0
    assert main(["train", "--run", "whole", "--resume", *OPTIONS, "--steps", "5"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "runs/whole/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pairs"], found["reward_accuracy"]) == (2, 1.0)
    assert found["loss"] < 0.5


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "completion": "b", "label": "yes"}, "'label' must be true or false, not"),
        ({"prompt": "a", "completion": "b", "label": 1}, "'label' must be true or false, not 1"),
        ({"prompt": "a", "completion": "b"}, "rows that all have prompt, completion and label"),
    ],
)
def test_labels_that_cannot_be_are_told_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], expected: str
) -> None:
    (place / "bad.jsonl").write_text("\n".join(map(json.dumps, [*judged(2), row])))
    given = ["--model", "model", "--data", "bad.jsonl", "--objective", "kto", *OPTIONS]
    assert main(["train", "--run", "bad", *given]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"bad.jsonl:3: {expected if 'label' in row else ''}" in line
    assert expected in line


MISTAKES = {
    "odd": (["--sequences", "7", "--micro-batch", "1"], "--sequences 7 is odd"),
    "odd micro-batch": (["--micro-batch", "1"], "--micro-batch 1 is odd"),
    "packed": (["--packing"], "every answer has its own"),
    "unknown": (
        ["--objective", "ppo"],
        "choose next-token, dpo, simpo, orpo, kto, reward, classify or embed",
    ),
    "beta": (["--beta", "0"], "--beta must be above 0"),
    "beta alone": (["--objective", "next-token", "--beta", "1"], "--beta belongs to"),
    "gamma alone": (["--gamma", "1"], "--gamma belongs to --objective simpo"),
    "gamma": (["--objective", "simpo", "--gamma", "-1"], "--gamma must be at least 0"),
    "not said": (["--objective", "next-token"], "pairs.jsonl:1: is a pair of answers"),
    "preset": (["--model", "tiny"], "name its folder with --model"),
    "no pairs": (["--data", "chats.jsonl"], "chats.jsonl:1: has 'text'; answers are compared"),
    "text": (["--data", "book.txt"], "book.txt has running text, and pairs.jsonl has rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, expected = MISTAKES[name]
    (place / "chats.jsonl").write_text('{"text": "the cat"}\n' * 3)
    (place / "book.txt").write_text("the cat sat\n" * 99)
    given = ["--model", "model", "--data", "pairs.jsonl", "--objective", "dpo", *OPTIONS]
    assert main(["train", "--run", "mine", *given, *more]) == 2
    told = capsys.readouterr().err
    assert expected in told
    assert told.count("\n") == 1
    assert not (place / "runs" / "mine" / "peer-0").exists()
