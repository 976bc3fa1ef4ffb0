"""Benchmark `liars`: every misdeed has its figures, and the defences hold on a small task."""

from __future__ import annotations

from atombench.common import BenchmarkOptions
from atombench.swarm import liars
from atombench.swarm.liars import LiarsSetup
from atombench.swarm.outer_swarm import Task


def test_liars_are_measured_with_and_without_defences() -> None:
    setup = LiarsSetup(
        task=Task(layers=1, width=32, context=16, steps=12, warmup_steps=3, text_bytes=100_000),
        sequences=2, local_steps=4, fragments=2, fragment_elements=50_000, members=(4,), audits=20,
    )  # fmt: skip
    result = liars.run(BenchmarkOptions(), setup)
    assert [entry["misdeed"] for entry in result["contributions"]] == [*liars.MISDEEDS]
    found = {entry["misdeed"]: entry for entry in result["contributions"]}
    assert found["-9 times"]["ratio"] < found["-9 times"]["undefended_ratio"]
    assert result["worst_ratio"] == max(entry["ratio"] for entry in result["contributions"])
    none, little, turned, some = (entry["found"] for entry in result["means"])
    assert (none, little, turned) == (0, 20, 20)
    assert some < 20, "one chunk in a hundred is seldom drawn"
    (cost,) = result["costs"]
    assert cost["cpu_s"] > 0
    assert cost["bytes_share"] == cost["defence_bytes"] / cost["moved_bytes"]
