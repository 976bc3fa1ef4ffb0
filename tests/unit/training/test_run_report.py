"""What a report of a run tells, and what it must not."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.main import main
from atomtrain.events import EventLog
from atomtrain.training.run_report import hidden, report_of

ID = "12D3KooWRmK9SbVxA1y7pVvGn2h3qYx4Zr6T8wLkQeUdFgHjKmNp"
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{ID}"
SECRETS = (
    "203.0.113.7", "198.51.100.9", "2001:db8", ID, "carols-thesis", "alice", "bob-laptop",
    "/home/carol", "carol@example.org", "books/diary.txt", "once upon a secret", "private-model",
    "topsecret.key", "NpQ7x2Yz",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "carols-thesis"
    log = EventLog(folder / "alice" / "events.jsonl")
    log.emit(
        "run_started", run="carols-thesis", peer="alice", model="private-model", device="NVIDIA X",
        precision="bf16", parameters=123, data="books/diary.txt", directory="/home/carol/runs",
        join_address=f"carols-thesis@{ADDRESS}",
    )  # fmt: skip
    log.emit("plan", text="segments   9, 1 slot of 5.0 MiB; 36.5 tokens/s", predicted_step_s=1.5)
    log.emit(
        "warning", message=f"peer NpQ7x2Yz at {ADDRESS} of alice failed; see /home/carol/x.log"
    )
    log.emit("warning", message="carol@example.org and 198.51.100.9:80 and 2001:db8:0:0:0:0:0:1")
    log.emit("step", step=1, loss=2.5, tokens=1024, measured=[["load", "forward 1", 0.5, 0.75]])
    log.emit("membership", peers=2, joined=["bob-laptop"], left=[])
    log.emit("round", round=3, members=["alice", "bob-laptop"], reason="bob-laptop was late")
    log.emit("sample", prompt="once", text="once upon a secret")
    log.emit(
        "novel", message="fine", words="books/diary.txt", n_bytes=7,
        lists=["books/diary.txt", "alice"],
    )  # fmt: skip
    log.close()
    (folder / "alice" / "recipe.yaml").write_text(
        "run: carols-thesis\nname: alice\nsteps: 20\nrun-key: topsecret.key\nplain: true\n"
    )
    return folder


def test_numbers_are_told_and_names_are_not(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.jsonl"
    assert main(["report", str(run), "--out", str(out)]) == 0
    text = out.read_text()
    for secret in (*SECRETS, platform.node(), str(tmp_path)):
        assert secret not in text, secret
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["versions"]["torch"]
    assert lines[0]["machine"]["cores"] >= 1
    assert lines[1] == {"peer": 0, "options": {"steps": 20, "plain": True}}
    told = {line["event"]: line for line in lines[2:]}
    assert "sample" not in told
    assert told["run_started"]["parameters"] == 123
    assert told["run_started"]["device"] == "NVIDIA X"
    assert told["plan"]["text"] == "segments   9, 1 slot of 5.0 MiB; 36.5 tokens/s"
    assert told["step"]["measured"] == [["load", "forward 1", 0.5, 0.75]]
    assert (told["membership"]["joined"], told["round"]["members"]) == (1, 2)
    assert told["round"]["reason"] == "NAME was late"
    assert (told["novel"]["words"], told["novel"]["n_bytes"]) == (None, 7)
    assert told["novel"]["lists"] == [None, None]


def test_one_peer_can_be_reported(run: Path) -> None:
    assert [line["peer"] for line in report_of(run / "alice") if "event" in line] == [0] * 8


def test_what_is_hidden_leaves_the_rest_as_it_is() -> None:
    text = "step 1.5 s, 36.5 tokens/s, 4 of 5 MiB (see docs/security.md); 04:19:41"
    assert hidden(text) == text
    assert hidden("open '/data/x', ~/y and ../z") == "open 'PATH', PATH and PATH"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "holds no events of a run" in told
    assert told.count("\n") == 1


def test_what_the_doctor_shares_has_no_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--share", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings
    assert "network" not in {finding["check"] for finding in findings}
    assert platform.node() not in json.dumps(findings)
