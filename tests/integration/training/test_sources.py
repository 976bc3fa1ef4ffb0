"""Several weighted sources and a validation source, by the real commands."""

from __future__ import annotations

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
    "--context", "32", "--sequences", "4", "--plain", "--no-profile", "--threads", "1",
    "--evaluate-every", "100", "--checkpoint-every", "100",
]  # fmt: skip
TRAIN = ["train", "--model", "model", *SMALL]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", UNTIED)
    words = SENTENCE.split()
    for name, count in (("a", 30), ("b", 12), ("judged", 5)):
        rows = [
            {"prompt": f"{words[n % 7]} ", "completion": " ".join(words[n % 5 : n % 5 + 4])}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    long = {"prompt": "the cat " * 40, "completion": "sat"}
    with (tmp_path / "b.jsonl").open("a") as stream:
        stream.write("\n" + json.dumps(long))
    return tmp_path


def events_of(place: Path, run: str, kind: str) -> list[dict[str, Any]]:
    events = read_events(place / "runs" / run / "peer-0" / "events.jsonl")
    return [event for event in events if event["event"] == kind]


def test_a_resumed_mixture_goes_on_bit_for_bit_and_needs_no_options(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--data", "a.jsonl:2", "--data", "b.jsonl", "--validation", "judged.jsonl",
             "--packing"]  # fmt: skip
    steady = ["--schedule", "constant", "--warmup-steps", "0", "--steps"]
    assert main([*TRAIN, *named, "--run", "whole", *steady, "6"]) == 0
    shown = capsys.readouterr().out
    assert "packing fills" in shown
    assert "1 rows are left out, with no answer within" in shown
    (laid,) = events_of(place, "whole", "data")
    assert (laid["rows"], laid["cut_rows"], laid["dropped_rows"]) == (43, 1, 1)
    assert 0.8 < laid["filled_share"] <= 1
    assert main([*TRAIN, *named, "--run", "half", *steady, "3"]) == 0
    go_on = ["train", *SMALL[:6], "--plain", "--no-profile", "--threads", "1"]
    assert main([*go_on, "--run", "half", "--resume", "--steps", "6"]) == 0
    losses = [[e["loss"] for e in events_of(place, run, "step")] for run in ("whole", "half")]
    assert losses[0] == losses[1]
    last = [events_of(place, run, "evaluation")[-1]["loss"] for run in ("whole", "half")]
    assert last[0] == last[1]
    capsys.readouterr()
    assert main(["evaluate", "runs/half/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 5, "the validation, and nothing else"
    (place / "judged.jsonl").write_text((place / "a.jsonl").read_text())
    assert main([*go_on, "--run", "half", "--resume", "--steps", "7"]) == 2
    assert "is not what" in capsys.readouterr().err


def test_running_text_has_weights_and_a_validation_too(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.txt", "two.txt", "three.txt"):
        write_text(place / name)
    named = ["--data", "one.txt:2", "--data", "two.txt:0.5", "--validation", "three.txt"]
    assert main([*TRAIN, *named, "--run", "texts", "--steps", "1"]) == 0
    assert main(["evaluate", "runs/texts/peer-0", "--json"]) == 0
    tiny = ["train", "--model", "tiny", *SMALL[:4], "--steps", "1", "--plain", "--no-profile"]
    assert main([*tiny, *named, "--run", "anew", "--device-memory", "16MiB"]) == 0


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["--data", "a.jsonl:0"], "has the weight '0'; a weight is a number above 0"),
        (["--data", "a.jsonl:-1"], "has the weight '-1'"),
        (["--data", "a.jsonl:two"], "has the weight 'two'"),
        (["--data", "a.jsonl", "--data", "one.txt"], "one.txt has running text, and a.jsonl has"),
        (["--data", "a.jsonl", "--validation", "one.txt"], "--validation one.txt has running"),
        (["--data", "a.jsonl", "--validation", "none.jsonl"], "none.jsonl does not exist"),
        (["--data", "a.jsonl", "--validation", "pairs.jsonl"], "is a pair of answers"),
    ],
)
def test_sources_that_cannot_be_are_told_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], named: list[str], expected: str
) -> None:
    write_text(place / "one.txt")
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (place / "pairs.jsonl").write_text(json.dumps(pair))
    assert main([*TRAIN, *named, "--run", "bad", "--steps", "1"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line
    assert not (place / "runs" / "bad").exists()
