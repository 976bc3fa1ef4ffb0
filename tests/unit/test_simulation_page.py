"""The pages of simulations are what their result says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atomtrain.benchmarks.scale_page import END, START, table
from atomtrain.benchmarks.simulation_encoding import measured_encoding
from atomtrain.benchmarks.simulation_page import _where_a_pipeline_wins, page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks/results/simulation.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_in_docs_is_that_of_the_result(result: dict[str, Any]) -> None:
    assert (ROOT / "docs/simulation.md").read_text(encoding="utf-8") == page(result)


def test_the_table_of_growing_swarms_is_that_of_the_result(result: dict[str, Any]) -> None:
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert f"{START}{table(result)}{END}" in text


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
