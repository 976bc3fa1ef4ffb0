"""The page of simulated ratios is what its result says."""

from __future__ import annotations

import json
from pathlib import Path

from atomtrain.benchmarks.simulation_page import page

ROOT = Path(__file__).parents[2]


def test_the_page_in_docs_is_that_of_the_result() -> None:
    result = json.loads((ROOT / "benchmarks/results/simulation.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/simulation.md").read_text(encoding="utf-8") == page(result)
