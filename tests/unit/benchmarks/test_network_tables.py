"""Tables of measured networks are what results say, and mark what does not count."""

from __future__ import annotations

import json

import pytest

from atombench.network.cases import cases
from atombench.network.panels import (
    UNFINISHED,
    command,
    largest_ratio,
    network_results,
    rate_name,
    rounds_finished,
)
from atombench.pages.network_tables import losses, network_rows, predictions
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
    assert "| our pipelines | 0 | 1 | +31% |" in predictions([case])


def test_a_row_that_was_disturbed_is_in_brackets() -> None:
    text = network_rows({**RESULT, "rows": [ROW, DISTURBED]})
    assert "| 4.00 |" in text
    assert "| (0.50: disturbed) |" in text


def test_a_row_without_a_finished_round_is_marked_and_is_not_the_largest() -> None:
    assert [rounds_finished(row) for row in (ROW, ALONE, {"ratio": None})] == [2, 0, 0]
    assert largest_ratio([ROW, ALONE, {**ROW, "ratio": None}]) == 4.0
    assert largest_ratio([ALONE]) is None
    text = network_rows({**RESULT, "rows": [ROW, ALONE]})
    assert "| (40.00: no round finished) |" in text


def test_the_page_explains_brackets_if_it_has_any() -> None:
    text = (ROOT / "docs/network-results.md").read_text(encoding="utf-8")
    for reason in (UNFINISHED, "disturbed"):
        assert (f": {reason})" in text) <= (f"*{reason}*" in text)


def test_predictions_of_all_results_are_counted_together() -> None:
    result = {**RESULT, "rows": [ROW]}
    assert "| 100 Mbit/s | 50 ms | 3,300 bits/MFLOP | itself |" in network_rows(result)
    text = predictions(2 * cases(result))
    assert "| all | 4 | 6 | +100% |" in text
    assert "| ATOM, round in s | 0 | 2 | +100% |" in text


def test_a_pipeline_that_was_too_slow_for_full_steps_is_told() -> None:
    text = network_rows({**RESULT, "rows": [{**ROW, "full_step_ratio": 2.2}]})
    assert "| 4.00 (2 to full steps, simulated) |" in text
    assert largest_ratio([{**ROW, "full_step_ratio": 2.2}]) == 2.2


def test_a_share_of_several_turns_is_told_with_its_spread() -> None:
    def told(**atom: object) -> str:
        return network_rows({**RESULT, "rows": [{**ROW, "atom": {**ROW["atom"], **atom}}]})  # type: ignore[dict-item]

    assert "| 0.95 |" in told(share_of_alone=0.95, shares_of_alone=[0.95])
    assert "| 0.95 (0.91 to 1.02) |" in told(
        share_of_alone=0.95, shares_of_alone=[0.91, 0.95, 1.02]
    )


def test_a_result_s_command_is_told() -> None:
    def told(links: str, *link: str) -> str:
        result = {**RESULT, "asked": {"links": links, "link": list(link)}, "rows": [ROW]}
        assert network_rows(result).startswith(f"`{command(result)}` on 2 cores of one, load 0.1")
        return command(result)

    always = "atom bench network --peers 2"
    assert told("all") == f"{always} --json"
    assert told("plain") == f"{always} --links plain --json"
    assert told("all", "1Mbit/s,1%", "2Mbit/s") == (
        f"{always} --link 1Mbit/s,1% --link 2Mbit/s --json"
    )


def test_both_kinds_of_data_parallelism_are_told() -> None:
    both = {"data_parallel_tokens_per_s": 90.0, "swapped_parallel_tokens_per_s": 40.0}
    assert "| 90, 40 |" in network_rows({**RESULT, "rows": [{**ROW, **both}]})
    assert "| -, - |" in network_rows({**RESULT, "rows": [ROW]})


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
    text = losses({"peers": 2, "train_s": 100.0, "curves": curves, "reached": [reached]})
    assert text.startswith("`atom bench time-to-loss --json`: 2 peers, ")
    assert "about 100 s for each method" in text
    assert "so they make 2 times as many updates" in text
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
    assert case.drift_share == pytest.approx(9.0)
    assert case.counted_error_share == case.knowing_error_share
    assert not case.right
    assert "| our pipelines | 0 | 1 | " in predictions([case])


def test_atom_s_steps_are_judged_by_their_times_in_the_run() -> None:
    atom = {"tokens_per_s": 80.0, "alone_tokens_per_s": 100.0, "round_s": []}
    own = {"compute_s": 1.5, "alone_compute_s": 1.2}
    (told,) = cases({"rows": [{**ROW, "atom": {**atom, **own}, "pipeline": None}]})
    # A quarter longer on its core, so a fifth slower: all that it is slower by.
    assert (told.error_share, told.drift_share) == (0.25, pytest.approx(0.25))
    assert told.counted_error_share == pytest.approx(0.0)
    assert told.right
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
