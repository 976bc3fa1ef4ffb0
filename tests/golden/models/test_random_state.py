"""ATOM in the middle of a program draws nothing that the program without it would not draw."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import atomtrain
from atomtrain.engine.calibration.disk_profile import measured_rates
from tests.support.engine_models import adamw, gpt, tokens


def states() -> tuple[Any, ...]:
    """Return the state of every generator that a program may use."""
    numbers = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]


def test_measuring_a_disk_draws_nothing(tmp_path: Path) -> None:
    before = states()
    measured_rates(tmp_path)
    assert states() == before


@pytest.mark.parametrize("disk", [False, True])
def test_opening_an_engine_and_steps_without_dropout_draw_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    # Nothing is known of this machine yet: all is measured.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(9)
    model, batches = gpt(), [tokens(), tokens()]
    options: dict[str, Any] = {"disk": str(tmp_path), "on_disk": "moments"} if disk else {}
    before = states()
    with atomtrain.swap(
        model,
        batches[0],
        optimizer=adamw,
        device="emulated:10GB/s",
        device_memory="64MiB",
        options=atomtrain.Options(micro_batches=2, **options),
    ) as engine:
        assert states() == before
        engine.step(batches)
        assert states() == before
        engine.evaluate(batches)
    assert states() == before


def test_what_a_program_draws_between_steps_does_not_depend_on_swapping() -> None:
    def drawn(swapped: bool) -> list[float]:
        torch.manual_seed(9)
        model, batch = gpt(dropout=0.3), tokens()
        numbers = []
        if not swapped:
            optimizer = adamw(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
                numbers.append(float(torch.rand(())))
            return numbers
        with atomtrain.swap(
            model, batch, optimizer=adamw, device="emulated:10GB/s", device_memory="64MiB"
        ) as engine:
            for _ in range(2):
                engine.step([batch])
                numbers.append(float(torch.rand(())))
        return numbers

    assert drawn(True) == drawn(False)
