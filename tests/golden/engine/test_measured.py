"""Measuring machine and layers changes nothing of what is trained: every other golden test assumes
their times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.swapped import (
    STEPS,
    check,
    gpt,
    pairs,
    regression,
    sequential_loss,
    token_batches,
)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_gpt(dropout: float) -> None:
    check(gpt(dropout, tied=False), token_batches(2), segments=3, clip_norm=0.1)


def test_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    before = model[1].running_mean.clone()
    steps = [pairs([6, 4], 5) for _ in range(STEPS)]
    check(model, steps, loss_of=sequential_loss, loss=regression, segments=2)
    assert not torch.equal(model[1].running_mean, before)
