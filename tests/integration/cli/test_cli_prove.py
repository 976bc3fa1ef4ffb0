"""`atom prove`: says equal where every bit is, and what differs where one is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from atomtrain.cli.main import main
from atomtrain.models import GPTConfig
from atomtrain.training.tools import proof


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove it with a smaller model."""
    config = GPTConfig(layers=3, width=64, heads=4, head_width=16, vocabulary=128, context=32)
    monkeypatch.setattr(proof, "CONFIG", config)
    monkeypatch.setattr(proof, "MICRO_BATCHES", 2)


def test_both_ways_end_with_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--steps", "2", "--device", "emulated", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["equal"] is True
    assert said["swapped_hash"] == said["resident_hash"]
    assert said["swapped_losses"] == said["resident_losses"]
    assert len(said["swapped_losses"]) == 2
    assert said["device_peak_bytes"] <= said["device_budget_bytes"] < said["state_bytes"] / 3
    assert said["segments"] > 1


def test_one_bit_that_differs_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = proof._resident

    def off(model: Any, *rest: Any) -> list[float]:
        history = resident(model, *rest)
        with torch.no_grad():
            bits = model.blocks[1].mlp_in.bias.view(torch.int32)
            bits[3] ^= 1
        return history

    monkeypatch.setattr(proof, "_resident", off)
    assert main(["prove", "--steps", "1", "--device", "emulated"]) == 1
    said = capsys.readouterr().out
    assert "Not equal. Parameters that differ: 1 (blocks.1.mlp_in.bias)." in said


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--steps", "0"], "--steps must be 1 to 1000, not 0"),
        (["--device", "gpu"], "Did you mean"),
        (["--device-memory", "much"], "much"),
        (["--device-memory", "1KiB"], "least"),
    ],
)
def test_mistakes_are_told_in_one_line(
    wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *wrong]) in (1, 2)
    out = capsys.readouterr()
    assert told in out.err
    assert out.out == ""
    assert len(out.err.strip().splitlines()) <= 2
