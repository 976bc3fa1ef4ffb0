"""The page that is made of results, and of results only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atombench.network.setup import gpu_flops_per_s
from atombench.report import _command
from atombench.report_figure import measured_ratios, predicted_to_measured
from atomtrain.cli.main import main

NETWORK = {
    "rows": [
        {
            "link_bits_per_s": 1e8,
            "round_trip_s": 0.0,
            "bits_per_flop": 1e-3,
            "stands_for": None,
            "atom_tokens_per_s": 400.0,
            "pipeline_tokens_per_s": 100.0,
            "data_parallel_tokens_per_s": None,
            "ratio": 4.0,
            "atom": {
                "tokens_per_s": 400.0,
                "predicted_tokens_per_s": 440.0,
                "rounds_averaged": 1,
                "round_s": [2.0],
                "predicted_round_s": 1.0,
            },
            "pipeline": {
                "tokens_per_s": 100.0,
                "trials": [
                    {"pipeline": "own", "tokens_per_s": 100.0, "predicted_tokens_per_s": 90.0},
                    {"pipeline": "1F1B", "tokens_per_s": 50.0, "predicted_tokens_per_s": 100.0},
                ],
            },
        },
        {
            "link_bits_per_s": 1e5,
            "round_trip_s": 0.0,
            "bits_per_flop": 1e8 / gpu_flops_per_s("rtx-3090"),
            "stands_for": {"gpu": "rtx-3090", "bits_per_s": 1e8, "model": None},
            "ratio": 40.0,
        },
        {
            "link_bits_per_s": 1e5,
            "round_trip_s": 0.0,
            "bits_per_flop": 1.0,
            "stands_for": {"gpu": "rtx-3090", "bits_per_s": 1e9, "model": "gpt3-xl"},
            "ratio": 2.0,
        },
    ],
    "peers": 2,
    "asked": {"links": "all", "link": []},
    "inputs": {"gpu": "rtx-3090"},
    "machine": {"processor": "A <processor>", "cores": 2, "os": "Linux 6"},
}
SIMULATION = {
    "rows": [
        {"model": model, "peers": 8, "link_bits_per_s": rate, "ratio": 1e9 / rate}
        for model in ("gpt3-small", "gpt3-medium", "gpt3-large", "gpt3-xl", "gpt3-2.7b", "gpt3-13b")
        for rate in (1e8, 1e9)
    ]
}
CURVE = {"name": "ATOM, slow", "seconds": [1.0, 2.0], "loss": [5.0, 4.0]}
LOSS = {"curves": [{**CURVE, "bits_per_flop": 1e-4}]}


def test_page_and_picture_hold_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, result in (
        ("network", NETWORK), ("simulation", SIMULATION), ("time-to-loss", LOSS),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    page = tmp_path / "page.html"
    assert main(["bench", "report", "--results", str(tmp_path), "--out", str(page)]) == 0
    assert capsys.readouterr().out.split() == [str(page), str(tmp_path / "page.png")]
    text = page.read_text()
    assert "A &lt;processor&gt;" in text
    assert "<processor>" not in text
    assert '<td class="number">4</td>' in text
    assert "no round finished" in text
    assert "atom bench time-to-loss --json" in text
    assert "http" not in text  # nothing is fetched by whoever looks at it
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_results_without_any_of_the_drawn_ones_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"x_s": 1.5}')
    page = tmp_path / "page.html"
    assert main(["bench", "report", "--results", str(tmp_path), "--out", str(page)]) == 0
    assert "x_s" in page.read_text()


def test_predictions_are_compared_with_measurements() -> None:
    plan = {"cases": [{"predicted_step_s": 1.0, "measured_step_s": 2.0}]}
    assert predicted_to_measured({"network-2-peers": NETWORK, "plan": plan}) == {
        "step of a plan": [0.5],
        "ATOM, tokens/s": [pytest.approx(1.1)],
        "ATOM, round in s": [pytest.approx(0.5)],
        "our pipelines": [pytest.approx(0.9)],
        "PyTorch's pipelines": [pytest.approx(2.0)],
    }


def test_measured_ratios_lie_where_a_gpu_s_link_has_as_many_bits_per_flop() -> None:
    by_flop, by_model = measured_ratios({"network": NETWORK}).values()
    assert by_flop == [
        (pytest.approx(1e8), 40.0, False),
        (pytest.approx(1e-3 * gpu_flops_per_s("rtx-3090")), 4.0, True),
    ]
    assert by_model == [(1e9, 2.0, False)]


def test_the_command_is_that_of_the_benchmark_and_its_peers() -> None:
    assert "atom bench network --peers 2 --json<" in _command("network-2-peers", NETWORK)
    assert "atom bench network --json<" in _command("network", {})
    assert "atom bench time-to-loss --json<" in _command("time-to-loss", {})
    assert _command("of my own", {}) == "Measured"


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (None, "no such folder"),
        ("", "cannot be read as a result"),
        ("[1]", "not a JSON object"),
    ],
)
def test_mistakes_take_one_line(
    prepare: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    if prepare is not None:
        folder.mkdir()
        (folder / "swap.json").write_text(prepare)
    arguments = ["--results", str(folder), "--out", str(tmp_path / "page.html")]
    assert main(["bench", "report", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_an_empty_folder_says_how_to_fill_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "report", "--results", str(tmp_path)]) == 2
    assert "atom bench swap --out" in capsys.readouterr().err
