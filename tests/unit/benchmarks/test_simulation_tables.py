"""Tables of simulations are what their result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atombench.pages.simulation_tables import (
    break_even_bits_per_s,
    conditions,
    fleet,
    goal,
    pipeline_wins,
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
    assert "gpt3-xl with 3 peers on 100 Mbit/s **3.25**" in run_for_real(result, elsewhere)
    (missing,) = run_for_real(result, runs).splitlines()
    assert missing.startswith("**Not run for real")
    assert "gpt3-175b" in missing
    assert "gpt3-xl" not in missing


def test_what_all_simulations_have_in_common_is_told() -> None:
    found = {"gpu": "h100", "round_trip_s": 0.03}
    assert conditions(found) == "Each peer is one h100; the round trip is 30 ms.\n"


def test_numbers_of_peers_with_the_same_ratios_share_a_row() -> None:
    rows: list[dict[str, Any]] = [
        {**row("small", 1e8, ratio, peers), "link": "a"}
        for peers, ratio in ((4, None), (8, 2.0), (16, 2.0))
    ]
    rows.append({"model": "huge", "left_out": "no host"})
    assert ratios({"rows": rows}, {}).splitlines()[2:] == [
        "| small | 4 | - |",
        "| small | 8, 16 | 2.00 |",
        "| huge | - | left out: no host |",
    ]


def row(model: str, rate: float, ratio: float | None, peers: int = 4) -> dict[str, Any]:
    return {"model": model, "peers": peers, "link_bits_per_s": rate, "ratio": ratio}


def test_where_twenty_times_is_reached_is_told_by_numbers() -> None:
    def told(*points: tuple[float, float]) -> str:
        return goal({"rows": [row("small", rate, ratio) for rate, ratio in points]})

    nowhere = told((3e7, 10.0), (1e8, 3.0))
    assert "nowhere in this table.** The largest ratio is 10.0, of small on 30 Mbit/s." in nowhere
    assert "about (Mbit/s): small 15." in nowhere
    reached = told((3e7, 25.0), (1e8, 7.5))
    assert reached == "With 4 peers: small on 30 Mbit/s (25.0).\n"
    assert "slower links" not in told((3e7, 1.2), (1e8, 1.1))


def test_one_sentence_says_where_a_pipeline_wins() -> None:
    rows = [
        *(row("small", rate, ratio) for rate, ratio in ((5e7, 2.0), (2e8, 0.5))),
        *(row("middle", rate, ratio) for rate, ratio in ((5e7, 0.9), (2e8, 0.5))),
        *(row("large", rate, ratio) for rate, ratio in ((5e7, 3.0), (2e8, 2.0))),
        row("huge", 5e7, None),
    ]
    sentence = pipeline_wins({"rows": rows})
    assert "With 4 peers" in sentence
    assert "more than the break-even (Mbit/s: small 100)" in sentence
    assert "on every one of these links with middle" in sentence
    assert "with large on none of these links" in sentence
    assert "huge" not in sentence
    sentence = pipeline_wins({"rows": rows[-3:]})
    assert (
        "a pipeline wins nowhere in this table; nearest to it is large on links of 200" in sentence
    )


def test_the_most_peers_with_which_models_fit_count() -> None:
    rows = [row("small", 1e8, 0.5), *(row("small", rate, 2.0, 8) for rate in (5e7, 1e8))]
    rows.append(row("huge", 1e8, None, 64))
    for said in (goal({"rows": rows}), pipeline_wins({"rows": rows})):
        assert said.startswith("With 8 peers")
        assert "nowhere" in said


def test_a_large_fleet_is_told_with_its_link(result: dict[str, Any]) -> None:
    text = fleet({**result["fleet"], "link_bits_per_s": 3e7, "lost_share": 0.5})
    assert "on links of 30 Mbit/s" in text
    assert "lose 50.00% of contributions" in text


def test_unsteady_peers_have_a_row_with_and_without_a_pipeline() -> None:
    run = {
        "share_of_staying": 0.5,
        "pipelines": 1.5,
        "stopped_share": 0.25,
        "stages": 4,
        "wire": "int8",
        "recompute": True,
    }
    same = {**row("small", 1e8, None, 8), "share_of_alone": 0.9}
    rows = [{**same, "pipelines": run, "ratio": 2.5}, {**same, "pipelines": None}]
    text = unsteady({"unsteady": rows, "fleet": {"spread": 0.3, "stay": 7200, "away": 600}})
    assert text.startswith("Speeds and links spread by 0.3 ")
    assert "Peers stay for 2 h 00 min and are away for 10 min 00 s" in text
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
