"""Benchmarks of averaging, with inputs of a test's size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atombench.averaging import averaging
from atombench.averaging.averaging import AveragingSetup
from atombench.common import BenchmarkOptions
from atombench.swarm import outer
from atombench.swarm.outer import Case, OuterSetup
from atombench.swarm.outer_swarm import Task
from atomtrain.errors import ConfigError


def test_rounds_on_loopback_have_the_right_mean() -> None:
    setup = AveragingSetup(
        peers=2, elements=700_000, rounds=1, slow_rounds=0, probe_bytes=1 << 20, part_bytes=()
    )
    result = averaging.run(BenchmarkOptions(), setup)
    assert {"peers", "bytes", "round_s", "floor_s", "link_bits_per_s"} <= result.keys()
    assert result["bytes"] == 2_800_000
    assert result["hivemind_round_s"] is None
    assert result["floor_s"] > 0  # measured at another moment: no bound on a busy machine
    assert result["round_s"] > 0
    assert result["sent_bytes_per_peer"] > 2_800_000
    assert len(result["all_mesh_s"]) == 1
    assert result["times_the_mesh"] == result["round_s"] / result["mesh_s"]
    assert result["times_the_streams"] == result["round_s"] / result["streams_s"]
    costs = result["costs"]
    assert {"sockets_s", "encryption_s", "hashing_s", "arithmetic_s", "event_loop_s"} < costs.keys()
    del costs["other_threads_s"]  # perhaps none
    assert all(0 < spent_s <= costs["all_s"] for spent_s in costs.values())
    assert set(result["processor_s"]) == {"round", "streams", "mesh"}
    with pytest.raises(ConfigError):
        AveragingSetup(peers=1)


class _Scripted:
    """Peers whose rounds end with means that are off by what the script says."""

    method = "hivemind"

    def __init__(self, *errors: float) -> None:
        self.errors, self.told = list(errors), list[str]()

    def tell_all(self, command: str, *_: object, **__: object) -> list[dict[str, float]]:
        self.told.append(command)
        if command == "check":
            return [{"error": 0.0}, {"error": self.errors.pop(0)}]
        return [{"round_s": 2.0}, {"round_s": 3.0}]


def _hivemind(peers: _Scripted) -> averaging._Hivemind:
    theirs = averaging._Hivemind(AveragingSetup(peers=2, part_bytes=()), None, [], Path())
    theirs._peers = peers  # type: ignore[assignment]
    return theirs


def test_a_wrong_mean_of_hivemind_is_counted_and_its_round_made_again() -> None:
    peers = _Scripted(1.5, 0.0, 0.0)
    theirs = _hivemind(peers)
    assert theirs.round_s(1.0) == 3.0
    assert theirs.wrong_rounds == 1
    # New averagers warm up by a round that does not count.
    assert [each for each in peers.told if each in ("average", "round")] == [
        "round", "average", "round", "round",
    ]  # fmt: skip


def test_means_of_hivemind_that_stay_wrong_end_the_benchmark() -> None:
    with pytest.raises(averaging.WrongMeanError, match=r"off by \[0.0, 1.5\]"):
        _hivemind(_Scripted(1.5, 1.5, 0.0, 1.5)).round_s(1.0)


def test_replicas_learn_and_poison_does_little() -> None:
    task = Task(layers=1, width=32, context=16, warmup_steps=3, text_bytes=100_000)
    short = Case(steps=30, local_steps=4, swarm_learning_rate=3e-3)
    setup = OuterSetup(
        task=task, sequences=2, cases=(short, replace(short, local_steps=2)), fragments=2,
        poisoned_peers=5, poisoned=replace(short, steps=12),
    )  # fmt: skip
    result = outer.run(BenchmarkOptions(), setup)
    assert result["swarm_loss"] < 5.0
    rare, frequent = result["cases"]
    assert rare["loss_ratio"] == result["loss_ratio"]
    assert rare["alone_loss"] == frequent["alone_loss"]
    # 15 rounds and 30, and two at the end, each of half of the model.
    rounds = frequent["sent_bytes_per_peer_step"] / rare["sent_bytes_per_peer_step"]
    assert rounds == pytest.approx(32 / 17)
    assert {entry["poison"] for entry in result["poisoned"]} == set(outer.POISONS)
    assert result["worst_poisoned_ratio"] < 1.1
    assert outer.run(BenchmarkOptions(), setup)["rows"] == result["rows"], "bit for bit again"
