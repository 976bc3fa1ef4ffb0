"""The page of measured networks is what its result says."""

from __future__ import annotations

import json
from pathlib import Path

from atomtrain.benchmarks.network_page import cases, page

ROOT = Path(__file__).parents[2]
ROW = {
    "link_bits_per_s": 1e8,
    "round_trip_s": 0.05,
    "stands_for": None,
    "atom_tokens_per_s": 400.0,
    "pipeline_tokens_per_s": 100.0,
    "data_parallel_tokens_per_s": None,
    "ratio": 4.0,
    "atom": {
        "tokens_per_s": 400.0,
        "predicted_tokens_per_s": 420.0,
        "round_s": [2.0, 4.0],
        "predicted_round_s": 6.0,
    },
    "pipeline": {
        "trials": [
            {"pipeline": "own", "tokens_per_s": 100.0, "predicted_tokens_per_s": 105.0},
            {"pipeline": "1F1B", "tokens_per_s": None, "predicted_tokens_per_s": 90.0},
        ]
    },
}
DISTURBED = {**ROW, "atom_tokens_per_s": 50.0, "ratio": 0.5}


def test_the_page_in_docs_is_that_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/network.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/network-results.md").read_text(encoding="utf-8") == page(result)


def test_every_prediction_that_was_measured_counts_misses_too() -> None:
    found = cases([ROW])
    assert [(case.what, round(case.error_share, 2)) for case in found] == [
        ("ATOM, tokens/s", 0.05),
        ("ATOM, round in s", 1.0),
        ("own", 0.05),
    ]


def test_a_row_that_was_disturbed_is_in_brackets() -> None:
    machine = {"cores": 2, "processor": "one"}
    result = {"rows": [ROW, DISTURBED], "peers": 2, "machine": machine, "load_average_before": 0.1}
    text = page(result)
    assert "| 4.00 |" in text
    assert "| (0.50) |" in text
    assert "It says nothing" in text
