"""`atom train --dry-run` says what the run is; epochs become steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atomtrain.cli.main import main
from atomtrain.events import read_events
from tests.support.hugging_face_models import UNTIED, write_model

COMMON = ["--host", "127.0.0.1", "--plain", "--no-profile", "--threads", "1", "--context", "32"]
PEER = "12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"
LINE = "the cat sat on the mat and the dog lay by the door of the old house\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(LINE * 200)
    return tmp_path


def rows(text: str) -> dict[str, str]:
    """Return what a dry run prints, by the first word of each line."""
    lines = text.splitlines()[1:]
    return {key: value.strip() for key, _, value in (line.partition(" ") for line in lines)}


def test_a_dry_run_tells_the_run_and_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(place / "models" / "small", UNTIED)
    given = ["train", "--model", "models/small", "--data", "text.txt", "--run", "mine", *COMMON,
             "--device-memory", "3MiB", "--lr", "1e-4", "--batch-size", "2",
             "--epochs", "3"]  # fmt: skip
    assert main([*given, "--dry-run"]) == 0
    told = capsys.readouterr()
    said = rows(told.out)
    assert "1 micro-batch of 2 sequences of 32 tokens" in said["step"]
    assert "up to 0.0001" in said["learning"]
    seen = float(re.search(r"seen ([0-9.]+) times", said["data"])[1])
    assert 3.0 <= seen < 3.2
    assert "the cat sat on the mat" in said["sample"]
    steps = int(said["time"].split()[0])
    assert "of 3.0 MiB" in said["device"]
    assert "checkpoints" in said["disk"]
    assert "is taken as --learning-rate 0.0001" in told.err
    assert {path.name for path in place.iterdir()} == {"models", "text.txt"}
    # The run itself is as it was told.
    assert main(given) == 0
    folder = place / "runs" / "mine" / "peer-0"
    events = list(read_events(folder / "events.jsonl"))
    (began,) = (event for event in events if event["event"] == "run_started")
    assert (began["steps"], began["tokens_per_step"]) == (steps, 64)
    assert events[-1]["step"] == steps
    (plan,) = (event for event in events if event["event"] == "plan")
    assert plan["predicted_device_peak_bytes"] <= 3 << 20


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        (["--run", "mine", "--resume"], "no checkpoint"),
        (["--join", f"mine@/ip4/127.0.0.1/tcp/1/p2p/{PEER}"], "--dry-run looks at new runs"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--epochs", "1e9"], "give fewer"),
    ],
)
def test_what_a_run_refuses_a_dry_run_refuses(
    place: Path, capsys: pytest.CaptureFixture[str], more: list[str], needed: str
) -> None:
    given = ["train", "--model", "tiny", "--data", "text.txt", "--vocabulary", "300", *COMMON]
    assert main([*given, *more, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert needed in said
    assert said.count("\n") == 1
    assert not (place / "runs").exists()
