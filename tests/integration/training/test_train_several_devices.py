"""`atom train` on several devices, and with documents that do not see each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from atomtrain.checkpoint import load_latest
from atomtrain.cli.main import main
from atomtrain.events import read_events
from tests.support.hugging_face_models import UNTIED, write_model

TWO = "emulated:4GiB/s,emulated:4GiB/s"
SENTENCE = "the cat sat on the mat and the dog lay by the door of the old house"
COMMON = [
    "--host", "127.0.0.1", "--plain", "--no-profile", "--threads", "1", "--steps", "4",
    "--evaluate-every", "100", "--checkpoint-every", "2", "--context", "32",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    words = SENTENCE.split()
    for n in range(60):
        said = [words[(n * k + k) % len(words)] for k in range(3 + n)]
        (tmp_path / "books" / f"{n:02}.txt").write_text(" ".join(said))
    return tmp_path


def train(name: str, *more: str, model: str = "tiny") -> int:
    given = ["train", "--model", model, "--data", "books/*.txt", "--run", name]
    return main([*given, *COMMON, *more])


def events(place: Path, name: str, kind: str) -> list[Any]:
    found = read_events(place / "runs" / name / "peer-0" / "events.jsonl")
    return [event for event in found if event["event"] == kind]


def test_two_devices_learn_what_one_learns(place: Path) -> None:
    more = ["--sequences", "6", "--vocabulary", "300", "--dropout", "0.1", "--micro-batch", "2",
            "--device-memory", "6MiB"]  # fmt: skip
    assert train("one", *more, "--device", "emulated:4GiB/s") == 0
    assert train("two", *more, "--device", TWO) == 0
    (began,) = events(place, "two", "run_started")
    assert began["device"] == "2 x emulated"
    (planned,) = events(place, "two", "plan")
    assert any(region["label"] == "of device 1, until they are added"
               for region in planned["memory"])  # fmt: skip
    one, two = events(place, "one", "step"), events(place, "two", "step")
    for alone, together in zip(one, two, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert 0 < together["device_peak_bytes"] <= 6 << 20
    # Interrupted after two steps, it goes on to the same bits.
    folder = place / "runs" / "two" / "peer-0" / "checkpoints"
    straight = load_latest(folder)
    assert straight.step == 4
    whole = dict(straight.shards())
    shutil.rmtree(straight.path)
    assert train("two", "--resume", "--device", TWO, "--device-memory", "6MiB") == 0
    for name, tensors in load_latest(folder).shards():
        for key, value in tensors.items():
            assert value.equal(whole[name][key]), (name, key)


def test_a_micro_batch_is_found_that_keeps_both_busy(place: Path) -> None:
    assert train("small", "--sequences", "4", "--vocabulary", "300", "--device", TWO) == 0
    (planned,) = events(place, "small", "plan")
    assert "predicted for 1 micro-batch:" in planned["text"]


def test_packing_of_running_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--sequences", "4", "--vocabulary", "300", "--device-memory", "6MiB"]
    assert train("apart", *more, "--packing", "--device", TWO) == 0
    assert train("mixed", *more, "--device", TWO) == 0
    apart, mixed = (events(place, name, "step")[0]["loss"] for name in ("apart", "mixed"))
    assert apart != mixed
    capsys.readouterr()
    assert main(["evaluate", "runs/apart/peer-0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = events(place, "apart", "evaluation")[-1]
    assert found["loss"] == pytest.approx(last["loss"], abs=1e-5)


def test_packing_for_a_hugging_face_model(place: Path) -> None:
    pytest.importorskip("transformers")
    write_model(place / "models" / "small", UNTIED)
    more = ["--sequences", "4", "--device", TWO, "--device-memory", "3MiB", "--packing"]
    assert train("tuned", *more, model="models/small") == 0
    losses = [event["loss"] for event in events(place, "tuned", "evaluation")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("device", "text"),
    [("emulated,cpu", "cannot share a model"), ("cuda:1,cuda:1", "name a GPU twice")],
)
def test_mistakes(place: Path, capsys: pytest.CaptureFixture[str], device: str, text: str) -> None:
    assert train("wrong", "--device", device) == 2
    assert text in capsys.readouterr().err
