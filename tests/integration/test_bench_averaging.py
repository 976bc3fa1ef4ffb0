"""Benchmarks of averaging, with inputs of a test's size."""

from __future__ import annotations

import pytest

from atomtrain.benchmarks import averaging, outer
from atomtrain.benchmarks.averaging import AveragingSetup
from atomtrain.benchmarks.common import BenchmarkOptions
from atomtrain.benchmarks.outer import OuterSetup
from atomtrain.benchmarks.outer_swarm import Task
from atomtrain.errors import ConfigError


def test_rounds_on_loopback_have_the_right_mean() -> None:
    setup = AveragingSetup(
        peers=2, elements=700_000, rounds=1, slow_rounds=0, probe_bytes=1 << 20, part_bytes=()
    )
    result = averaging.run(BenchmarkOptions(), setup)
    assert {"peers", "bytes", "round_s", "floor_s", "link_bits_per_s"} <= result.keys()
    assert result["bytes"] == 2_800_000
    assert result["hivemind_round_s"] is None
    assert 0 < result["floor_s"] < result["round_s"]
    assert result["sent_bytes_per_peer"] > 2_800_000
    with pytest.raises(ConfigError):
        AveragingSetup(peers=1)


def test_replicas_learn_and_poison_does_little() -> None:
    task = Task(layers=1, width=32, context=16, steps=30, warmup_steps=3, text_bytes=100_000)
    setup = OuterSetup(
        task=task, sequences=2, local_steps=4, fragments=2, seeds=1, poisoned_peers=5,
        poisoned_steps=12,
    )  # fmt: skip
    result = outer.run(BenchmarkOptions(), setup)
    assert result["swarm_loss"] < 5.0
    assert {entry["poison"] for entry in result["poisoned"]} == set(outer.POISONS)
    assert result["worst_poisoned_ratio"] < 1.1
    assert outer.run(BenchmarkOptions(), setup)["rows"] == result["rows"], "bit for bit again"
