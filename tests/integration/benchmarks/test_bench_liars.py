"""Benchmark `liars`: every misdeed has its figures, and the defences hold on a small task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atombench.common import BenchmarkOptions, report
from atombench.liars import liars, means
from atombench.liars.costs import CostsSetup
from atombench.liars.learners import ALL, GHOSTS
from atombench.liars.liars import QUICK, LiarsSetup
from atombench.liars.means import MEANS, MeansSetup
from atomtrain.errors import ConfigError

_COSTS = CostsSetup(fragment_elements=50_000, members=(4,), audits=20, width=32)
_MISDEEDS = ("-9 times", "a mean times 0.98", "another mean to one member", "NaN", GHOSTS)


def test_liars_are_measured_with_and_without_defences() -> None:
    setup = LiarsSetup(learning=QUICK.learning, misdeeds=_MISDEEDS, costs=_COSTS)
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


def test_rows_are_kept_one_by_one_and_costs_are_measured_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = tmp_path / "liars.json", []
    keep = liars.keep_partial

    def look(result: dict[str, object], to: Path | None) -> None:
        keep(result, to)
        assert to is not None
        kept.append(json.loads(to.read_text()))

    monkeypatch.setattr(liars, "keep_partial", look)
    setup = LiarsSetup(learning=QUICK.learning, misdeeds=("nothing", "NaN"), costs=_COSTS)
    again = BenchmarkOptions(out=out, costs=True)
    with pytest.raises(ConfigError, match="measure all first"):
        liars.run(again, setup)
    result = liars.run(BenchmarkOptions(out=out), setup)
    assert [[row["misdeed"] for row in one["rows"]] for one in kept] == [
        ["nothing"], ["nothing", "NaN"],
    ]  # fmt: skip
    assert [one["complete"] for one in kept] == [False, False]

    monkeypatch.delattr(liars, "learnt")
    assert liars.run(again, setup)["complete"] is False, "as what it goes on from"
    report(result, out=out)
    later = liars.run(again, setup)
    shares = ("defence_bytes_share", "defence_step_share")
    for before, after in zip(result["rows"], later["rows"], strict=True):
        assert {**before, **{key: after[key] for key in shares}} == after
        assert after["defence_step_share"] == later["costs"][0]["step_share"]
    assert "complete" not in later
    other = LiarsSetup(learning=QUICK.learning, misdeeds=("nothing",), costs=_COSTS)
    with pytest.raises(ConfigError, match="of the same inputs"):
        liars.run(again, other)


def test_ways_to_average_are_compared(tmp_path: Path) -> None:
    out, misdeeds = tmp_path / "means.json", ("sign flipped", "noise")
    setup = MeansSetup(learning=QUICK.learning, misdeeds=misdeeds)
    result = means.run(BenchmarkOptions(out=out), setup)
    assert json.loads(out.read_text())["rows"] == result["rows"]
    rows = {row["mean"]: row for row in result["rows"]}
    assert [*rows] == [*MEANS]
    assert len({row["loss_without"] for row in rows.values()}) >= len(MEANS) - 1, (
        "each is another way; a geometric median may be the plain mean, nearly"
    )
    for row in rows.values():
        assert row["loss_without"] < 1.1 * rows["plain"]["loss_without"], "rounds go on"
        assert {*row["losses"]} == {*misdeeds}
        assert row["worst_loss"] == row["losses"][row["worst_misdeed"]]
    worst = {mean: row["worst_loss"] for mean, row in rows.items()}
    assert worst["clipped"] < worst["plain"]
