"""What was measured, as text and as a picture; curves, and who was where when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from atombench import benchmark
from atombench.network.measured import curve as curve_of
from atombench.network.measured import smoothed
from atombench.network.model import ModelSetup
from atombench.network.panels import METHODS, all_panels, draw_bars, link_panels, text
from atombench.network.time_to_loss import _reached
from atomtrain.errors import ConfigError

CURVE = {"seconds": [1.0, 2.0], "tokens": [10, 20], "loss": [5.0, 3.0]}
METHOD = {"tokens_per_s": 1000.0, "sent_bytes_per_token": 90.4, "utilisation": 0.5, "curve": CURVE}
ROW: dict[str, Any] = {
    "link_bits_per_s": 1e7,
    "round_trip_s": 0.1,
    "loss_share": 0.01,
    "bits_per_flop": 2e-4,
    "stands_for": None,
    "ratio": 10.0,
    "errors": ["gloo peer 0 ended"],
    "atom": {**METHOD, "rounds_averaged": 2},
    "pipeline": {**METHOD, "tokens_per_s": 100.0},
    "data_parallel": {"left_out": "a step would take at least 60 s"},
}
ALONE = {**ROW, "atom": {**METHOD, "rounds_averaged": 0}, "errors": []}
NETWORK = {"peers": 2, "rows": [ROW, ALONE]}
RATIO = {"bits_per_flop": 2.5e-6}
LOSSES = {
    "curves": [
        {"link": "slow", "method": "ATOM", **RATIO, **CURVE},
        {"link": "slow", "method": "data parallel", **RATIO, **METHOD, **CURVE},
        {"link": "slower", "method": "ATOM", **RATIO, **CURVE},
    ]
}


def test_both_results_have_one_form() -> None:
    first, second = link_panels(NETWORK)
    assert first.name == "2 peers, 10 Mbit/s, 100 ms, 1% lost\n200 bits/MFLOP"
    assert second.name.endswith("(no round finished)")
    assert set(first.methods) == {"atom", "pipeline"}
    assert first.methods["pipeline"].tokens_per_s == 100.0
    slow, slower = link_panels(LOSSES)
    assert set(slow.methods) == {"atom", "data_parallel"}
    # A run without rates of its own has them of its tokens and seconds.
    assert slower.methods["atom"].tokens_per_s == 10.0
    assert slow.methods["data_parallel"].loss == [5.0, 3.0]
    # What a link is to the peers' speed stands beside it.
    assert (slow.name, slower.name) == ("slow\n2.5 bits/MFLOP", "slower\n2.5 bits/MFLOP")


def test_results_of_the_network_only_are_found_by_name() -> None:
    assert len(all_panels({"network-2": NETWORK, "time-to-loss": LOSSES, "plan": {}})) == 2


def test_people_read_a_line_for_each_method_and_what_counts_for_nothing() -> None:
    told = text(NETWORK)
    line = next(line for line in told.splitlines() if line.startswith("  ATOM"))
    assert line.split() == ["ATOM", "1k", "90", "50%", "5.00", "->", "4.00"]
    assert "(itself): 10.00\n" in told
    assert "10.00, which counts for nothing: no round finished" in told
    assert "gloo peer 0 ended" in told
    assert "data parallel" in text(LOSSES)


def test_both_results_are_drawn(tmp_path: Path) -> None:
    for name, result in (("network", NETWORK), ("time-to-loss", LOSSES)):
        entry = benchmark(name)
        entry.draw(result, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert entry.text(result)
    assert benchmark("swap").text({}) is None


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_the_legend_hides_no_bar(rows: int) -> None:
    """However long they are: here all are as long as the axis."""
    row = {**ROW, **dict.fromkeys(METHODS, METHOD)}
    figure = Figure(figsize=(5.0, 1.2 + 0.5 * rows), layout="constrained")
    axes = figure.subplots()
    draw_bars(axes, link_panels({"peers": 2, "rows": [row] * rows}), "utilisation", "title")
    figure.draw_without_rendering()
    hidden = axes.get_legend().get_window_extent()
    assert len(axes.patches) == rows * len(METHODS)
    assert not any(hidden.overlaps(bar.get_window_extent()) for bar in axes.patches)


def curve(method: str, losses: list[float], step_s: float, tokens: int) -> dict[str, object]:
    return {"method": method, "link": "slow", **curve_of(losses, step_s, tokens, 0)}


def test_steps_before_the_measurement_count_in_time_and_tokens() -> None:
    found = curve_of([3.0, 2.0], step_s=10.0, tokens=7, before=2)
    assert found == {"seconds": [30.0, 40.0], "tokens": [21, 28], "loss": [3.0, 2.0]}


def test_losses_are_means_of_the_last_steps() -> None:
    assert smoothed([6.0, 4.0, 2.0, 2.0, 1.0, 1.0]) == [6.0, 5.0, 4.0, 3.5, 3.0, 2.0]


def test_who_reaches_the_other_s_end_first_is_told() -> None:
    ours = curve("ATOM", [5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0], 1.0, 100)
    theirs = curve("pipeline", [4.0, 4.0], 4.0, 100)
    (found,) = _reached([ours, theirs])
    assert found["baseline_loss"] == 4.0
    assert found["baseline_s"] == 8.0
    assert found["atom_s"] == 3.0  # (5 + 4 + 3) / 3 = 4
    assert found["equal_tokens"] == 200
    assert found["atom_loss_at_equal_tokens"] == 4.5
    assert found["baseline_loss_at_equal_tokens"] == 4.0


def test_who_never_gets_there_is_told_too() -> None:
    (found,) = _reached(
        [curve("ATOM", [5.0, 4.9], 1.0, 100), curve("data parallel", [3.0], 2.0, 100)]
    )
    assert found["atom_s"] is None


def test_text_is_drawn_from_a_file_alike_for_all(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    setup = ModelSetup(vocabulary=256, sequence_tokens=8, text=str(tmp_path / "text"))
    first, second = (setup.micro_batches(3, 6, 2) for _ in range(2))
    assert len(first) == 3
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"])
        assert torch.equal((a["input_ids"] + 1) % 256, a["labels"])
    assert not torch.equal(first[0]["input_ids"], setup.micro_batches(4, 6, 2)[0]["input_ids"])


def test_bytes_need_a_vocabulary_of_256() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 256"):
        ModelSetup(vocabulary=64, text="book.txt")
