"""Tables of simulations are what their result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atombench.pages.simulation_tables import (
    bounds,
    break_even_bits_per_s,
    ratios,
    real_runs,
    run_for_real,
    unsteady,
)
from atombench.simulation import measured_encoding
from tests.support import ROOT


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/results/simulation.json").read_text(encoding="utf-8")
    )
    return found


def _run(ratio: float, model: str | None = "gpt3-xl", rounds: int = 1) -> dict[str, Any]:
    return {
        "stands_for": {"gpu": "rtx-3090", "bits_per_s": 1e8, "model": model},
        "ratio": ratio,
        "atom_tokens_per_s": 100.0,
        "atom": {"rounds_averaged": rounds},
    }


def test_cases_that_were_run_for_real_are_marked(result: dict[str, Any]) -> None:
    rows = [_run(3.25), _run(9.5, model=None), _run(8.5, rounds=0)]
    networks = [{"peers": 4, "rows": rows}]
    runs = real_runs(networks, "rtx-3090")
    assert runs == {("gpt3-xl", 4, 1e8): [3.25]}
    assert real_runs(networks, "a100-40gb") == {}
    marked = [line for line in ratios(result, runs).splitlines() if "**3.25**" in line]
    assert len(marked) == 1
    assert marked[0].startswith("| gpt3-xl | 4 |")
    assert "**" not in ratios(result, {})
    elsewhere = real_runs([{"peers": 3, "rows": [_run(3.25)]}], "rtx-3090")
    assert "**" not in ratios(result, elsewhere)
    assert run_for_real(elsewhere).endswith("| gpt3-xl | 3 | 100 Mbit/s | **3.25** |\n")


def test_numbers_of_peers_with_the_same_ratios_share_a_row() -> None:
    def row(peers: int, ratio: float | None) -> dict[str, Any]:
        return {"model": "small", "peers": peers, "link": "a", "link_bits_per_s": 1e8,
                "ratio": ratio}  # fmt: skip

    rows = [row(4, None), row(8, 2.0), row(16, 2.0), {"model": "huge", "left_out": "no host"}]
    assert ratios({"rows": rows}, {}).splitlines()[2:] == [
        "| small | 4 | - |",
        "| small | 8, 16 | 2.00 |",
        "| huge | - | left out: no host |",
    ]


def line_of(*points: tuple[float, float | None], model: str = "small") -> str:
    """Return the bounds of one model, by the ratio on each link."""
    rows = [
        {"model": model, "peers": 4, "link_bits_per_s": rate, "ratio": ratio}
        for rate, ratio in points
    ]
    return bounds({"rows": rows}).splitlines()[-1]


def test_where_twenty_times_is_reached_is_told_by_numbers() -> None:
    assert line_of((3e7, 10.0), (1e8, 3.0)).endswith("| 10.0 on 30 Mbit/s | 15 Mbit/s |")
    assert line_of((3e7, 25.0), (1e8, 7.5)).endswith("| 25.0 on 30 Mbit/s | 30 Mbit/s |")
    assert line_of((3e7, 1.2), (1e8, 1.1)).endswith("| 1.2 on 30 Mbit/s | - |")


def test_where_a_pipeline_wins_is_told_by_numbers() -> None:
    assert "| small | 0.50 on 200 Mbit/s | 100 Mbit/s |" in line_of((5e7, 2.0), (2e8, 0.5))
    assert "| 0.50 on 200 Mbit/s | all of these links |" in line_of((5e7, 0.9), (2e8, 0.5))
    assert "| 2.00 on 200 Mbit/s | none of these links |" in line_of((5e7, 3.0), (2e8, 2.0))


def test_bounds_are_of_the_most_peers_and_of_models_that_fit() -> None:
    def row(model: str, peers: int, ratio: float | None) -> dict[str, Any]:
        return {"model": model, "peers": peers, "link_bits_per_s": 1e8, "ratio": ratio}

    both = [{**row("small", 8, 2.0), "link_bits_per_s": rate} for rate in (5e7, 1e8)]
    rows = [row("small", 4, 9.0), *both, row("huge", 8, None), row("huge", 64, None)]
    text = bounds({"rows": rows})
    assert text.startswith("| model, 8 peers |")
    assert "9.0" not in text
    assert "huge" not in text


def test_unsteady_peers_have_a_row_with_and_without_a_pipeline() -> None:
    run = {
        "share_of_staying": 0.5,
        "pipelines": 1.5,
        "stopped_share": 0.25,
        "stages": 4,
        "wire": "int8",
        "recompute": True,
    }
    row = {"model": "small", "peers": 8, "link_bits_per_s": 1e8, "share_of_alone": 0.9}
    rows = [{**row, "pipelines": run, "ratio": 2.5}, {**row, "pipelines": None, "ratio": None}]
    text = unsteady(rows)
    assert (
        "| small | 8 | 100 Mbit/s | 90.0% | 50.0% | 1.5 | 25.0% | 4 stages, int8, recomputing "
        "| 2.50 |" in text
    )
    assert "| small | 8 | 100 Mbit/s | 90.0% | - | - | - | - | - |" in text


def test_encoding_is_measured_for_every_format_that_is_simulated() -> None:
    for found in measured_encoding().values():
        assert set(found["used"]) == set(found["measured"])
        assert min(found["measured"].values()) > 0


def rows(*points: tuple[float, float]) -> list[dict[str, float]]:
    return [{"link_bits_per_s": rate, "ratio": ratio} for rate, ratio in points]


def test_between_two_links_it_breaks_even_where_powers_cross() -> None:
    # The ratio falls as 1 / rate: 2 at 50, 1 at 100.
    assert break_even_bits_per_s(rows((200.0, 0.5), (50.0, 2.0))) == pytest.approx(100.0)


def test_a_pipeline_may_win_everywhere_or_nowhere() -> None:
    assert break_even_bits_per_s(rows((10.0, 0.9), (100.0, 0.8))) == 0.0
    assert break_even_bits_per_s(rows((10.0, 3.0), (100.0, 1.0))) is None
    assert break_even_bits_per_s([]) is None


def test_of_several_crossings_the_last_counts() -> None:
    points = rows((1.0, 4.0), (10.0, 0.9), (100.0, 1.1), (1000.0, 0.9))
    found = break_even_bits_per_s(points)
    assert found is not None
    assert 100 < found < 1000
