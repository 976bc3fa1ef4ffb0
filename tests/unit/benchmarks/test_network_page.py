"""The page of measured networks is what its results say, and marks what does not count."""

from __future__ import annotations

import json

import pytest

from atombench.network.cases import cases
from atombench.network.panels import (
    command,
    largest_ratio,
    network_results,
    rate_name,
    rounds_finished,
)
from atombench.pages.network_page import page
from tests.support import ROOT

ROW = {
    "link_bits_per_s": 1e8,
    "round_trip_s": 0.05,
    "bits_per_flop": 3.3e-3,
    "stands_for": None,
    "atom_tokens_per_s": 400.0,
    "pipeline_tokens_per_s": 100.0,
    "data_parallel_tokens_per_s": None,
    "ratio": 4.0,
    "atom": {
        "tokens_per_s": 400.0,
        "rounds_averaged": 2,
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
ALONE = {
    **ROW,
    "ratio": 40.0,
    "atom": {**ROW["atom"], "rounds_averaged": 0, "round_s": []},  # type: ignore[dict-item]
}
RESULT = {
    "peers": 2,
    "machine": {"cores": 2, "processor": "one"},
    "load_average_before": 0.1,
    "peer_flops_per_s": 3e10,
    "asked": {"links": "all", "link": []},
    "inputs": {},
}


def test_the_page_in_docs_is_that_of_the_results() -> None:
    folder = ROOT / "benchmarks/results"
    paths = [*sorted(folder.glob("network*.json")), *folder.glob("time-to-loss.json")]
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    assert (ROOT / "docs/network-results.md").read_text(encoding="utf-8") == page(results)


def test_every_prediction_that_was_measured_counts_misses_too() -> None:
    found = cases({"rows": [ROW]})
    assert [(case.what, round(case.error_share, 2)) for case in found] == [
        ("ATOM, tokens/s", 0.05),
        ("ATOM, round in s", 1.0),
        ("own", 0.05),
    ]


def test_a_pipeline_measured_several_times_counts_by_its_mean() -> None:
    # The trial was long enough to be the first of both.
    found = {**ROW["pipeline"], "pipeline": "own", "tokens_per_s_of_both": [100.0, 60.0]}  # type: ignore[dict-item]
    row = {**ROW, "pipeline": found}
    case = cases({"rows": [row]})[-1]
    assert (case.each, case.measured) == ((100.0, 60.0), 80.0)
    text = page([{**RESULT, "rows": [row]}])
    assert "| own | 105 | 80 (100, 60) | **+31%** |" in text
    assert "differ by 67% (median), 67% at most" in text
    assert "Measurements differ" not in page([{**RESULT, "rows": [ROW]}])


def test_a_row_that_was_disturbed_is_in_brackets() -> None:
    text = page([{**RESULT, "rows": [ROW, DISTURBED]}])
    assert "| 4.00 |" in text
    assert "| (0.50: disturbed) |" in text


def test_a_row_without_a_finished_round_is_marked_and_is_not_the_largest() -> None:
    assert [rounds_finished(row) for row in (ROW, ALONE, {"ratio": None})] == [2, 0, 0]
    assert largest_ratio([ROW, ALONE, {**ROW, "ratio": None}]) == 4.0
    assert largest_ratio([ALONE]) is None
    text = page([{**RESULT, "rows": [ROW, ALONE]}])
    assert "| (40.00: no round finished) |" in text
    assert "*no round finished* while ATOM was measured" in text


def test_brackets_are_explained_only_where_there_are_any() -> None:
    assert "In brackets" not in page([{**RESULT, "rows": [ROW]}])


def test_results_of_several_numbers_of_peers_are_one_page() -> None:
    text = page([{**RESULT, "rows": [ROW]}, {**RESULT, "peers": 4, "rows": [ROW]}])
    assert "## 2 peers on 2 cores" in text
    assert "## 4 peers on 2 cores" in text
    assert text.count("| 100 Mbit/s | 50 ms | 3,300 bits/MFLOP | itself |") == 2
    assert "**4 of 6 are within 10% of what was measured**" in text
    assert "| **+100%** |" in text


def test_a_pipeline_that_was_too_slow_for_full_steps_is_told() -> None:
    text = page([{**RESULT, "rows": [{**ROW, "full_step_ratio": 2.2}]}])
    assert "| 4.00 (2 to full steps, simulated) |" in text
    assert largest_ratio([{**ROW, "full_step_ratio": 2.2}]) == 2.2


def test_a_share_of_several_turns_is_told_with_its_spread() -> None:
    def told(**atom: object) -> str:
        return page([{**RESULT, "rows": [{**ROW, "atom": {**ROW["atom"], **atom}}]}])  # type: ignore[dict-item]

    assert "| 0.95 |" in told(share_of_alone=0.95, shares_of_alone=[0.95])
    assert "| 0.95 (0.91 to 1.02) |" in told(
        share_of_alone=0.95, shares_of_alone=[0.91, 0.95, 1.02]
    )


def test_a_result_s_command_is_told_and_names_its_section() -> None:
    def told(links: str, *link: str) -> tuple[str, str]:
        result = {**RESULT, "asked": {"links": links, "link": list(link)}, "rows": [ROW]}
        return command(result), next(line for line in page([result]).splitlines() if "##" in line)

    always = "atom bench network --peers 2"
    assert told("all") == (f"{always} --json", "## 2 peers on 2 cores")
    assert told("plain") == (f"{always} --links plain --json", "## 2 peers on 2 cores: plain links")
    assert told("alone") == (
        f"{always} --links alone --json",
        "## 2 peers on 2 cores: the swarm against its peers alone",
    )
    assert told("all", "1Mbit/s,1%", "2Mbit/s") == (
        f"{always} --link 1Mbit/s,1% --link 2Mbit/s --json",
        "## 2 peers on 2 cores: further links",
    )


def test_both_kinds_of_data_parallelism_are_told() -> None:
    both = {"data_parallel_tokens_per_s": 90.0, "swapped_parallel_tokens_per_s": 40.0}
    assert "| 90, 40 |" in page([{**RESULT, "rows": [{**ROW, **both}]}])
    assert "| -, - |" in page([{**RESULT, "rows": [ROW]}])


def test_losses_are_told_link_by_link() -> None:
    def curve(method: str, loss: list[float]) -> dict[str, object]:
        return {
            "link": "slow",
            "bits_per_flop": 2.5e-6,
            "method": method,
            "seconds": [1.0, 2.0],
            "tokens": [10, 2000],
            "loss": loss,
        }

    reached = {
        "link": "slow",
        "baseline": "pipeline",
        "atom_s": 1.0,
        "atom_loss_at_equal_tokens": 3.0,
        "baseline_loss_at_equal_tokens": 3.5,
    }
    curves = [curve("ATOM", [4.0, 2.0]), curve("pipeline", [4.0, 3.0])]
    text = page([{"peers": 2, "train_s": 100.0, "curves": curves, "reached": [reached]}])
    assert "| slow | 2.5 bits/MFLOP | ATOM | 2 | 2k | 3.00 | - | - | - |" in text
    assert "| slow | 2.5 bits/MFLOP | pipeline | 2 | 2k | 3.50 | 1 s | 3.50 | 3.00 |" in text


def test_rates_have_the_unit_that_people_would_use() -> None:
    names = [rate_name(rate) for rate in (1e10, 1e9, 6.1e8, 4.149e6, 999_990.0, 87_755.4)]
    assert names == [
        "10 Gbit/s",
        "1 Gbit/s",
        "610 Mbit/s",
        "4.15 Mbit/s",
        "1 Mbit/s",
        "87.8 kbit/s",
    ]


def test_results_of_the_benchmark_are_found_by_their_names() -> None:
    names = ("network", "network-4-peers", "networks", "plan")
    assert list(network_results({name: {} for name in names})) == ["network", "network-4-peers"]


def test_the_network_s_model_is_told_from_the_machine_s_moods() -> None:
    result = json.loads((ROOT / "benchmarks/results/network-4-peers.json").read_text("utf-8"))
    first, *_ = result["rows"]
    trial, *_ = first["pipeline"]["trials"]
    # Ten times as slow as just before, so what is predicted of that is less.
    compute_s = [10 * stage_s for stage_s in trial["compute_s"]]
    known = {**trial, "own_compute_s": compute_s}
    pipeline = {**first["pipeline"], "trials": [known], "own_compute_s_of_both": [compute_s]}
    rows = [{**first, "pipeline": pipeline}]
    (case,) = [case for case in cases({**result, "rows": rows}) if case.kind == "our pipelines"]
    assert case.knowing is not None
    assert case.knowing < 0.95 * case.predicted
    assert case.knowing_error_share == case.knowing / case.measured - 1
    text = page([{**result, "rows": rows}])
    assert case.drift_share == pytest.approx(9.0)
    assert case.counted_error_share == case.knowing_error_share
    assert f"| +900% | **{case.knowing_error_share:+.0%}** |" in text
    assert "Of the" not in page([RESULT | {"rows": [ROW]}])


def test_atom_s_steps_are_judged_by_their_times_in_the_run() -> None:
    atom = {"tokens_per_s": 80.0, "alone_tokens_per_s": 100.0, "round_s": []}
    own = {"compute_s": 1.5, "alone_compute_s": 1.2}
    (told,) = cases({"rows": [{**ROW, "atom": {**atom, **own}, "pipeline": None}]})
    # A quarter longer on its core, so a fifth slower: all that it is slower by.
    assert (told.error_share, told.drift_share) == (0.25, pytest.approx(0.25))
    assert told.counted_error_share == pytest.approx(0.0)
    assert told.right
    assert not told.close
    (older,) = cases({"rows": [{**ROW, "atom": atom, "pipeline": None}]})
    assert older.knowing is None
    assert not older.right


def test_a_round_is_judged_with_the_steps_that_it_waited_for() -> None:
    result = json.loads((ROOT / "benchmarks/results/network.json").read_text("utf-8"))
    row = result["rows"][0]
    found = cases({**result, "rows": [{**row, "pipeline": None}]})
    (told,) = [case for case in found if case.what == "ATOM, round in s"]
    slower = row["atom"]["alone_tokens_per_s"] / row["atom"]["tokens_per_s"]
    assert told.drift_share == pytest.approx(slower - 1)
    assert told.knowing is not None
    assert told.knowing / told.predicted == pytest.approx(slower, rel=0.05)
