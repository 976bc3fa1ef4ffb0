"""The terminal view: charts of characters, and the view itself under a pilot."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.views.dashboard.source import FolderSource
from atomtrain.views.dashboard.terminal import bars, curve
from tests.support.dashboard_run import STEPS, tell_step, write_run

finite = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(finite, finite), max_size=40), st.integers(1, 60), st.integers(1, 9))
def test_a_curve_has_its_size_whatever_the_points(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    lines = curve(sorted(points), width, height)
    assert len(lines) == (height if points else 1)
    assert len({len(line) for line in lines}) == 1


def test_a_curve_falls_where_its_values_fall() -> None:
    lines = curve([(0, 3.0), (1, 2.0), (2, math.nan), (3, 1.0)], 12, 3)
    assert lines[0].startswith("3 ")
    assert lines[2].startswith("1 ")
    assert lines[0][2] != "\u2800"
    assert lines[0][-1] == "\u2800"
    assert lines[2][-1] != "\u2800"
    assert curve([], 10, 3) == ["nothing yet"]


def test_bars_show_when_each_stream_is_busy() -> None:
    spans = [
        ["compute", "forward 0", 5.0, 6.0], ["compute", "backward 0", 6.0, 7.0],
        ["load", "forward 0", 5.0, 5.5], ["new stream", "?", 6.5, 7.0],
        ["load", "garbage", "x", 1.0], "garbage", ["load", "empty", 3.0, 3.0],
    ]  # fmt: skip
    load, compute, other = bars(spans, 8)
    assert (load.stream, load.cells) == ("load", "██      ")
    assert (compute.stream, compute.cells) == ("compute", "████▒▒▒▒")
    assert (other.stream, other.cells) == ("new stream", "      ░░")
    assert compute.busy_share == 1.0
    assert bars([], 8) == []


def test_the_view_follows_a_run(tmp_path: Path) -> None:
    pytest.importorskip("textual")
    from textual.widgets import DataTable, Static

    from atomtrain.views.dashboard.terminal import Watch

    logs = write_run(tmp_path, peers=2)

    async def follow() -> None:
        app = Watch(FolderSource(tmp_path))

        def shown(place: str) -> str:
            return str(app.query_one(f"#{place}", Static).render())

        async with app.run_test(size=(100, 40)) as pilot:
            assert "showing peer-0" in shown("head")
            assert "made-up" in shown("head")
            assert "compute" in shown("step")
            assert "held-out" not in shown("step")
            table = app.query_one("#peers", DataTable)
            assert table.row_count == 2
            assert str(table.get_row_at(0)[1]) == f"{STEPS}/{STEPS}"
            await pilot.press("n")
            assert "showing peer-1" in shown("head")
            import random

            tell_step(logs["peer-1"], STEPS + 1, random.Random(1))
            app._follow()
            assert str(table.get_row_at(1)[1]) == f"{STEPS + 1}/{STEPS}"
            await pilot.resize_terminal(60, 24)

            def fits(place: str) -> bool:
                columns = app.query_one(f"#{place}", Static).content_size.width
                drawn = shown(place).splitlines()[1:]  # below what it is
                return bool(drawn) and max(map(len, drawn)) <= columns < 60

            for _ in range(1000):
                if all(map(fits, ("loss", "speed", "step"))):
                    break
                await pilot.pause(0.05)
            assert all(map(fits, ("loss", "speed", "step"))), "drawn for the new width"
            await pilot.press("q")

    asyncio.run(follow())
