"""`atom train --compile`: what a run says of it, and that a resumed one goes on as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atomtrain.checkpoint import load_latest
from atomtrain.cli.main import main
from atomtrain.engine.execution.compiled import CACHE_VARIABLE
from atomtrain.events import read_events
from tests.support.compile_times import CompileTimes

COMMON = [
    "--model", "tiny", "--data", "text.txt", "--vocabulary", "300", "--context", "16",
    "--sequences", "2", "--micro-batch", "1", "--device", "emulated:4GiB/s", "--host", "127.0.0.1",
    "--plain", "--threads", "1", "--steps", "4", "--evaluate-every", "100",
    "--checkpoint-every", "2",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("assumed_times", "no_search_for_a_fit")


@pytest.fixture
def times(
    assumed_times: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CompileTimes]:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and the dog lay by the door\n" * 200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    given = CompileTimes()
    given.install(monkeypatch)
    yield given
    torch._dynamo.reset()


def train(name: str, *more: str) -> str:
    """Train; return what the run said of its layers last."""
    assert main(["train", "--run", name, *COMMON, *more]) == 0
    found = read_events(Path("runs", name, "peer-0", "events.jsonl"))
    lines = [event["text"].splitlines()[-1] for event in found if event["event"] == "plan"]
    assert lines[-1].startswith("layers     ")
    return str(lines[-1].removeprefix("layers     "))


def newest(name: str) -> Any:
    return load_latest(Path("runs", name, "peer-0", "checkpoints"))


def shards(name: str) -> dict[str, Any]:
    return dict(newest(name).shards())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        value.equal(other[shard][key]) for shard, held in one.items() for key, value in held.items()
    )


@pytest.mark.parametrize(
    ("ratio", "line"),
    [
        (1.25, "compiled: 1.25 times as fast in the profile"),
        (0.75, "not compiled: 0.75 times as fast in the profile, less than 1.05"),
    ],
)
def test_a_resumed_run_goes_on_as_it_was(
    times: CompileTimes, ratio: float, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times.speed_ratio = ratio
    assert train("mine") == line
    assert f"  layers     {line}\n" in capsys.readouterr().out
    straight = shards("mine")
    taken = newest("mine").meta["compiling"]["compiled"]
    assert taken is (ratio > 1)
    # Interrupted after two steps; in the profile it is the other way round now.
    shutil.rmtree(newest("mine").path)
    shutil.rmtree("cache")
    before = Path("runs")
    shutil.copytree(before, "other")
    times.speed_ratio = 1 / ratio
    assert train("mine", "--resume") == f"{line.partition(':')[0]}: as in the checkpoint"
    assert same(shards("mine"), straight)
    # Unless something else is said: then it has other bits, and that counts from now on.
    shutil.rmtree(before)
    shutil.copytree("other", before)
    said = "off" if taken else "on"
    assert train("mine", "--resume", f"--compile={said}").endswith("compiled: as chosen")
    assert not same(shards("mine"), straight)
    assert newest("mine").meta["compiling"]["compiled"] is not taken


def test_a_compiled_run_is_not_changed_where_nothing_can_be_compiled(
    times: CompileTimes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times.speed_ratio = 1.25
    assert train("mine").startswith("compiled")
    capsys.readouterr()
    monkeypatch.setenv("CXX", "no-such-compiler")
    more = ["--run", "mine", "--resume", "--steps", "6"]
    assert main(["train", *COMMON, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no no-such-compiler" in line
    assert line.endswith("or turn compile off")
    assert train("mine", *more[2:], "--compile", "off") == "not compiled: as chosen"
