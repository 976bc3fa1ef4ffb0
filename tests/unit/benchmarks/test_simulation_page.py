"""The pages of simulations are what their result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atombench.pages.scale_page import END, START, table
from atombench.pages.simulation_page import (
    _goal,
    _where_a_pipeline_wins,
    measured_ratios,
    page,
)
from atombench.simulation import measured_encoding
from tests.support import ROOT


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/results/simulation.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_in_docs_is_that_of_the_results(result: dict[str, Any]) -> None:
    paths = sorted((ROOT / "benchmarks/results").glob("network*.json"))
    networks = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    assert (ROOT / "docs/simulation.md").read_text(encoding="utf-8") == page(result, networks)


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
    assert measured_ratios(networks, "rtx-3090") == {("gpt3-xl", 4, 1e8): [3.25]}
    assert measured_ratios(networks, "a100-40gb") == {}
    text = page(result, networks)
    marked = [line for line in text.splitlines() if "**3.25**" in line]
    assert len(marked) == 1
    assert marked[0].startswith("| gpt3-xl | 4 |")
    assert "--peers 4" in text
    (missing,) = [line for line in text.splitlines() if line.startswith("**Not run for real")]
    assert "gpt3-175b" in missing
    assert "gpt3-xl" not in missing
    assert "Bold: run for real" not in page(result)
    elsewhere = [{"peers": 3, "rows": [_run(3.25)]}]
    assert "gpt3-xl with 3 peers on 100 Mbit/s **3.25**" in page(result, elsewhere)


def test_where_twenty_times_is_reached_is_told_by_numbers() -> None:
    def row(rate: float, ratio: float) -> dict[str, Any]:
        return {"model": "small", "peers": 4, "link_bits_per_s": rate, "ratio": ratio}

    nowhere = "\n".join(_goal([row(3e7, 10.0), row(1e8, 3.0)]))
    assert "nowhere in this table" in nowhere
    assert "about (Mbit/s): small 15." in nowhere
    assert "small on 30 Mbit/s (25.0)" in "\n".join(_goal([row(3e7, 25.0), row(1e8, 7.5)]))
    flat = "\n".join(_goal([row(3e7, 1.2), row(1e8, 1.1)]))
    assert "slower links" not in flat


def test_the_table_of_growing_swarms_is_that_of_the_result(result: dict[str, Any]) -> None:
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert f"{START}{table(result)}{END}" in text


def test_unsteady_peers_have_a_table_with_and_without_a_pipeline(result: dict[str, Any]) -> None:
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
    text = page({**result, "unsteady": rows})
    assert (
        "| small | 8 | 100 Mbit/s | 90.0% | 50.0% | 1.5 | 25.0% | 4 stages, int8, recomputing "
        "| 2.50 |" in text
    )
    assert "| small | 8 | 100 Mbit/s | 90.0% | - | - | - | - | - |" in text
    assert "Peers that differ" not in page({**result, "unsteady": []})


def test_one_sentence_says_where_a_pipeline_wins() -> None:
    def row(model: str, rate: float, ratio: float | None) -> dict[str, Any]:
        return {"model": model, "peers": 4, "link_bits_per_s": rate, "ratio": ratio}

    rows = [
        *(row("small", rate, ratio) for rate, ratio in ((5e7, 2.0), (2e8, 0.5))),
        *(row("middle", rate, ratio) for rate, ratio in ((5e7, 0.9), (2e8, 0.5))),
        *(row("large", rate, ratio) for rate, ratio in ((5e7, 3.0), (2e8, 2.0))),
        row("huge", 5e7, None),
    ]
    sentence = list(_where_a_pipeline_wins(rows))[-1]
    assert "With 4 peers" in sentence
    assert "more than the break-even (Mbit/s: small 100)" in sentence
    assert "on every one of these links with middle" in sentence
    assert "with large on none of these links" in sentence
    assert "huge" not in sentence
    (sentence,) = list(_where_a_pipeline_wins(rows[-3:]))[-1:]
    assert (
        "a pipeline wins nowhere in this table; nearest to it is large on links of 200" in sentence
    )


def test_encoding_is_measured_for_every_format_that_is_simulated() -> None:
    for found in measured_encoding().values():
        assert set(found["used"]) == set(found["measured"])
        assert min(found["measured"].values()) > 0
