"""What is made of losses: curves, and who was where when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atombench.network.measured import curve as curve_of
from atombench.network.measured import smoothed
from atombench.network.model import ModelSetup
from atombench.network.time_to_loss import _reached
from atomtrain.errors import ConfigError


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
