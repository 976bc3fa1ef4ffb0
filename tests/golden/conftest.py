"""What tests that compare bits share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw weights and data alike in each run."""
    torch.manual_seed(1234)


@pytest.fixture
def fastest_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the fastest plan, with slots and buffers to spare, and not the leanest of those that are
    about as fast: on chains this long the search for that one takes longer than the training."""
    monkeypatch.setattr("atomtrain.planning.search.search.EQUAL", 0.0)
