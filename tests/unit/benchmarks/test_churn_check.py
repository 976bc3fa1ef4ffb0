"""The checks of the churn benchmark see what they claim to see, on made-up events."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atombench import bench
from atombench.churn.check import (
    averaging_times,
    checked,
    compare_checkpoints,
    disagreements,
    first_and_last_loss,
    rejoin_times,
    stops,
)
from atombench.churn.churn import ChurnSetup, _Churn
from atombench.churn.peers import ChurnPeer, Crowd
from atombench.common import requests_noted
from atomtrain.checkpoint import save
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def process() -> subprocess.Popen[bytes]:
    """Any process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait(PATIENCE_S)
    return ended


@pytest.fixture
def peer(process: subprocess.Popen[bytes], tmp_path: Path) -> Any:
    """Make a peer with events of one kind."""

    def make(name: str, events: Iterable[dict[str, Any]], ended_s: float = 1000.0) -> ChurnPeer:
        made = ChurnPeer(name, tmp_path / name, process)
        made.started_s, made.ended_s = 0.0, ended_s
        made.events = list(events)
        return made

    return make


def steps(*times_s: float, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"event": "step", "time_s": t, "loss": loss} for t in times_s]


def anchor(time_s: float, version: int, digest: str, fragment: int = 0) -> dict[str, Any]:
    return {
        "event": "round", "time_s": time_s, "fragment": fragment,
        "version": version, "digest": digest,
    }  # fmt: skip


def test_the_longest_stop_counts_up_to_the_end(peer: Any) -> None:
    found = stops([peer("a", steps(1, 2, 5), 6), peer("b", steps(3, 4), 44), peer("c", [], 99)])
    assert found.longest_s == 40
    assert found.hangs == 1


def test_a_step_after_the_end_is_no_negative_stop(peer: Any) -> None:
    assert stops([peer("a", steps(1, 2), ended_s=1.5)]).longest_s == 1


def test_rejoining_ends_with_the_first_step(peer: Any) -> None:
    assert rejoin_times([peer("a", steps(7, 9)), peer("b", [])]) == [7]


def rounds(*ended: tuple[float, str, int]) -> list[dict[str, Any]]:
    return [
        {"event": "round", "time_s": t, "duration_s": 0.1, "outcome": o, "contributors": n}
        for t, o, n in ended
    ]


def test_a_newcomer_averages_when_a_round_of_several_has_come_to_something(peer: Any) -> None:
    alone, failed = (3, "averaged", 1), (4, "abandoned", 3)
    found = [
        peer("a", rounds(alone, failed, (7, "partial", 2), (9, "averaged", 3))),
        peer("b", rounds(alone, failed)),
    ]
    assert averaging_times(found) == [7]


def test_events_of_a_peer_that_has_ended_are_read_once(peer: Any) -> None:
    ended = peer("a", [])
    ended.folder.mkdir()
    file = ended.folder / "events.jsonl"
    file.write_text('{"event": "step"}\n')
    ended.read()
    file.unlink()
    ended.read()
    assert len(ended.of("step")) == 1


class StandIn(ChurnPeer):
    """A peer that runs, without a process."""

    def __init__(self, name: str, folder: Path, kind: str) -> None:
        super().__init__(name, folder, None)  # type: ignore[arg-type]
        self.events = steps(1.0) if kind != "joins" else []
        self.events += rounds((2.0, "averaged", 2)) if kind == "averages" else []
        self.events.append({"event": "run_started", "join_address": f"run@{name}"})

    def read(self) -> None:
        return

    @property
    def running(self) -> bool:
        return True


@pytest.mark.parametrize("kinds", [["trains"] * 3 + ["joins"] * 5, ["trains"] + ["joins"] * 3])
def test_victims_are_drawn_at_once_and_one_that_trains_is_left(
    kinds: list[str], tmp_path: Path
) -> None:
    crowd = Crowd(tmp_path, "run", [])
    crowd.peers += [StandIn(str(index), tmp_path, kind) for index, kind in enumerate(kinds)]
    churn = _Churn(ChurnSetup(peers=len(kinds), at_once=3), crowd)
    drawn = [churn._victims(3) for _ in range(200)]
    assert all(len({id(victim) for victim in victims}) == 3 for victims in drawn)
    assert all(any(p.training for p in crowd.peers if p not in victims) for victims in drawn)
    joining = {p.name for p in crowd.peers if not p.training}
    assert joining <= {victim.name for victims in drawn for victim in victims}


def test_a_newcomer_that_only_trains_is_waited_for_and_counts_as_a_hang(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "run", [])
    crowd.peers += [StandIn(kind, tmp_path, kind) for kind in ("averages", "trains")]
    churn = _Churn(ChurnSetup(peers=2, start_s=0.01), crowd)
    churn._wait_for_newcomers()
    churn._wait_for_newcomers()
    assert [peer.name for peer in churn.late] == ["trains"]


class MadeUpCrowd(Crowd):
    """Peers without processes; those that start average at once, and none waits."""

    def start(self, join: str | None = None) -> ChurnPeer:
        self.peers.append(StandIn(f"peer-{len(self.peers)}", self._folder, "averages"))
        return self.peers[-1]

    def kill(self, *peers: ChurnPeer) -> None:
        for peer in peers:
            peer.killed = True

    def running(self) -> list[ChurnPeer]:
        return [peer for peer in self.peers if not peer.killed]

    def wait(self, condition: Any, within_s: float, poll_s: float = 0.1) -> bool:
        return bool(condition())


@pytest.mark.parametrize("asked_after", [2, 9], ids=["cut", "whole"])
def test_who_is_asked_to_end_says_how_many_were_killed(tmp_path: Path, asked_after: int) -> None:
    kept: list[dict[str, Any]] = []
    crowd = MadeUpCrowd(tmp_path, "run", [])
    for _ in range(3):
        crowd.start()
    churn = _Churn(ChurnSetup(kills=5), crowd, kept.append)
    churn.asked = lambda: len(kept) >= asked_after
    churn.churn()
    kills = min(asked_after, 5)
    assert [now["kills"] for now in kept] == list(range(1, kills + 1))
    assert churn.seen()["kills"] == kills
    assert churn.complete is (kills == 5)


def test_who_left_before_it_trained_has_saved_nothing_to_compare(peer: Any) -> None:
    joining, gone = peer("a", []), peer("b", [])
    gone.folder.mkdir()
    (gone.folder / "peer.log").write_text("no memory")
    result = checked([joining, gone], [joining])
    assert (result["ended_by_themselves"], result["last_anchors_compared"]) == (1, 0)


def test_who_still_saves_has_not_ended_by_itself(peer: Any, tmp_path: Path) -> None:
    hanging, gone = StandIn("hanging", tmp_path / "hanging", "trains"), peer("gone", [])
    for one in (hanging, gone):
        one.folder.mkdir()
        (one.folder / "peer.log").write_text("saving")
    result = checked([hanging, gone], [])
    assert (result["hung_at_the_end"], result["ended_by_themselves"]) == (1, 1)


def test_the_first_request_to_end_is_noted_and_the_second_obeyed() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGINT):
        with requests_noted() as asked:
            assert not asked()
            signal.raise_signal(number)
            assert asked()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_a_result_that_was_cut_is_told_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for complete, code in ((False, 130), (True, 0)):
        entry = SimpleNamespace(
            takes=(), text=lambda _: None, run=lambda _, c=complete: {"complete": c}
        )
        monkeypatch.setattr(bench, "benchmark", lambda _, entry=entry: entry)
        assert bench.run(["churn", "--json"]) == code
        assert json.loads(capsys.readouterr().out) == {"complete": complete}


def test_losses_are_taken_in_order_of_time(peer: Any) -> None:
    late, early = steps(*range(10, 20), loss=2.0), steps(*range(10), loss=6.0)
    assert first_and_last_loss([peer("a", late), peer("b", early)]) == (6.0, 2.0)


def test_equal_hashes_and_other_fragments_are_no_disagreement(peer: Any) -> None:
    one = peer("a", [anchor(1, 1, "x"), anchor(2, 1, "y", fragment=1), anchor(3, 2, "z")])
    other = peer("b", [anchor(2, 1, "x"), anchor(3, 3, "w")])
    assert disagreements([one, other]) == []


@pytest.mark.parametrize(
    ("later", "ended_s", "outcome"),
    [
        ([anchor(9, 2, "z")], 1000.0, "repaired"),
        ([anchor(9, 2, "other")], 1000.0, "lasting"),
        ([], 1000.0, "lasting"),
        ([], 5.0, "cut short"),
    ],
)
def test_what_becomes_of_a_disagreement(
    peer: Any, later: list[dict[str, Any]], ended_s: float, outcome: str
) -> None:
    one = peer("a", [anchor(1, 1, "x"), anchor(8, 2, "z")])
    other = peer("b", [anchor(2, 1, "y"), *later], ended_s)
    found = disagreements([one, other])
    assert found[0].outcome == outcome
    assert found[0].peers == ("a", "b")
    assert found[0].seen_s == 2


def test_a_fetch_of_the_same_version_repairs(peer: Any) -> None:
    one = peer("a", [anchor(1, 1, "x")])
    other = peer("b", [anchor(2, 1, "y"), anchor(3, 1, "x")])
    assert disagreements([one, other]) == []


def test_checkpoints_are_compared_where_versions_are_equal(tmp_path: Path) -> None:
    def write(name: str, versions: list[int], first: float) -> Path:
        tensors = {"anchor.0": torch.tensor([first, 2.0]), "anchor.1": torch.zeros(3)}
        save(tmp_path / name, 1, {"swarm": tensors}, {"swarm": {"versions": versions}})
        return tmp_path / name

    same = [write("a", [4, 7], 1.0), write("b", [4, 8], 1.0)]
    assert compare_checkpoints(same) == (1, 0)
    more = [*same, write("c", [4, 7], 1.0000001)]
    assert compare_checkpoints(more) == (4, 2)
    # -0.0 equals 0.0 as a number: only a comparison of bits tells them apart.
    zeros = [write("d", [5, 9], -0.0), write("e", [5, 9], 0.0)]
    assert compare_checkpoints(zeros) == (2, 1)
