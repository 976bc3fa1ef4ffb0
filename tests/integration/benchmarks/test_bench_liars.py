"""Benchmark `liars`: every misdeed has its figures, and the defences hold on a small task."""

from __future__ import annotations

from atombench.common import BenchmarkOptions
from atombench.liars import liars
from atombench.liars.costs import CostsSetup
from atombench.liars.learners import ALL, GHOSTS
from atombench.liars.liars import QUICK, LiarsSetup

_MISDEEDS = ("-9 times", "a mean times 0.98", "another mean to one member", "NaN", GHOSTS)


def test_liars_are_measured_with_and_without_defences() -> None:
    setup = LiarsSetup(
        learning=QUICK.learning, misdeeds=_MISDEEDS,
        costs=CostsSetup(fragment_elements=50_000, members=(4,), audits=20, width=32),
    )  # fmt: skip
    assert {*_MISDEEDS} < {*ALL}
    result = liars.run(BenchmarkOptions(), setup)
    rows = {row["misdeed"]: row for row in result["rows"]}
    assert [*rows] == [*_MISDEEDS]
    nine = rows["-9 times"]
    assert nine["ratio"] < 1.1 < nine["undefended_loss"] / nine["loss_without"]
    assert result["worst_ratio"] == max(row["ratio"] for row in result["rows"])
    assert result["honest_expelled"] == 0
    for misdeed in ("a mean times 0.98", "another mean to one member"):
        assert rows[misdeed]["expelled"] == ["peer3"]
    assert rows["a mean times 0.98"]["noticed_rounds"] <= 2
    assert rows["NaN"]["undefended_loss"] is None, "nothing else kept it away"
    (cost,) = result["costs"]
    for row in result["rows"]:
        assert row["defence_bytes_share"] == cost["bytes_share"]
        assert row["defence_step_share"] == cost["step_share"] > 0

    none, little, turned, some = (entry["found"] for entry in result["means"])
    assert (none, little, turned) == (0, 20, 20)
    assert some < 20, "one chunk in a hundred is seldom drawn"
    assert cost["cpu_s"] > 0
    assert cost["bytes_share"] == cost["defence_bytes"] / cost["moved_bytes"]
