"""Tables of simulations are what their result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atombench.pages.simulation_tables import ratios, real_runs, unsteady
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
