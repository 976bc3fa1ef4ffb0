"""The real command `atom train --trace`: prediction and reality side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atomtrain.cli.main import main

COMMAND = (
    "train", "--model", "tiny", "--data", "text.txt", "--threads", "1", "--plain", "--steps", "2",
    "--sequences", "2", "--context", "32", "--device", "emulated:1GiB/s", "--no-profile",
)  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with a text to train on."""
    monkeypatch.chdir(tmp_path)
    lines = (f"{n}: the swarm meets layer {n % 7} in round {n % 10}.\n" for n in range(300))
    (tmp_path / "text.txt").write_text("".join(lines))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_last_step_is_traced_beside_its_prediction(tmp_path: Path) -> None:
    assert main([*COMMAND, "--trace", "step.json"]) == 0
    read = json.loads((tmp_path / "step.json").read_text())
    assert read["otherData"]["model"] == "tiny"
    assert read["otherData"]["measured_step_s"] > 0
    events = read["traceEvents"]
    accounts = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(accounts) == ["predicted", "measured: step 2"]
    for stream in ("compute", "load", "unload", "update"):
        predicted, measured = (
            {e["name"] for e in events if e.get("cat") == stream and e["pid"] == process}
            for process in accounts.values()
        )
        assert measured
        # Work that was predicted to take no time is not in the prediction.
        assert predicted <= measured


def test_a_trace_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert main([*COMMAND, "--trace", "nowhere/step.json"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "--trace nowhere/step.json" in lines[0]
    assert sorted(tmp_path.iterdir()) == before
