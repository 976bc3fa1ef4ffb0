"""Curves: thinned without losing a peak, taken up where a run resumes, sent as what changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.views.dashboard.history import MOST_POINTS, Curves


def of(*losses: Any, most_points: int = MOST_POINTS) -> Curves:
    curves = Curves(("loss",), most_points)
    for x, loss in enumerate(losses):
        curves.add(x, {"loss": loss})
    return curves


def test_a_long_curve_has_few_points_and_keeps_peaks_and_mean() -> None:
    curves = Curves(("loss",))
    for x in range(100_000):
        curves.add(x, {"loss": 1000.0 if x == 54_321 else -7.0 if x == 99_999 else float(x % 2)})
    body = curves.body()
    assert body is not None
    loss = body["fields"]["loss"]
    assert MOST_POINTS / 2 <= len(body["x"]) == len(loss["mean"]) <= MOST_POINTS
    assert (body["every"], body["x"][:2]) == (128, [0, 128])
    assert max(loss["high"]) == 1000
    assert min(loss["low"]) == -7
    assert loss["mean"][0] == 0.5
    assert loss["high"].index(1000) == 54_321 // 128


def test_short_curves_are_exact() -> None:
    body = of(3.0, math.nan, 2.5, None, True, "x").body()
    assert body is not None
    assert body == {
        "from": 0, "every": 1, "x": [0, 1, 2, 3, 4, 5],
        "fields": {"loss": {"mean": [3, None, 2.5, None, None, None]}},
    }  # fmt: skip


def test_a_figure_that_nobody_told_is_not_sent() -> None:
    curves = Curves(("loss", "gradient_norm"))
    curves.add(1, {"loss": 1.0})
    body = curves.body()
    assert body is not None
    assert list(body["fields"]) == ["loss"]


@pytest.mark.parametrize("x", [-1, 1.5, None, "3", 1 << 60])
def test_what_is_no_place_is_left_out(x: Any) -> None:
    curves = Curves(("loss",))
    curves.add(x, {"loss": 1.0})
    assert curves.body() is None


def test_news_are_what_changed() -> None:
    curves = of(1.0, 2.0)
    assert curves.news() == curves.body()
    assert curves.news() is None
    curves.add(2, {"loss": 3.0})
    news = curves.news()
    assert news is not None
    assert (news["from"], news["x"]) == (2, [2])
    curves.add(1, {"loss": 9.0})  # resumed
    news = curves.news()
    assert news is not None
    assert (news["from"], news["x"], news["fields"]["loss"]["mean"]) == (1, [1], [9])
    curves.cut(0)
    assert curves.news() == {"from": 0, "every": 1, "x": [], "fields": {}}


@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(-1e6, 1e6)), max_size=150),
    st.integers(2, 16),
    st.integers(1, 10),
)
def test_who_follows_the_news_has_the_whole(
    told: list[tuple[int, float]], most_points: int, each: int
) -> None:
    """Whatever is repeated, as `curves.js` applies it; and nothing but the newest is in it."""
    curves = Curves(("loss",), most_points)
    xs: list[int] = []
    values: list[Any] = []
    every, known = 1, {}
    for count, (x, loss) in enumerate(told):
        known = {at: value for at, value in known.items() if at < x - x % curves.every}
        curves.add(x, {"loss": loss})
        known[x] = loss
        if count % each:
            continue
        if (news := curves.news()) is not None:
            kept = [at for at in xs if at < news["from"]] if news["every"] == every else []
            every = news["every"]
            xs = kept + news["x"]
            values = values[: len(kept)] + news["fields"]["loss"]["mean"]
        body = curves.body()
        assert body is not None
        assert (xs, values) == (body["x"], body["fields"]["loss"]["mean"])
    assert len(curves.points("loss")) <= most_points
    body = curves.body()
    if body is not None:
        found = body["fields"]["loss"]
        highs = found.get("high", found["mean"])
        for start, high in zip(body["x"], highs, strict=True):
            there = [v for x, v in known.items() if start <= x < start + body["every"]]
            assert high == pytest.approx(max(there), rel=1e-5)
