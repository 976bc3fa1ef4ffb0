"""What all tests of the engine share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "unit"))


@pytest.fixture
def assumed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume the rates of layers and host, so that plans are quickly made and always the same."""
    from engine_models import assumed_times

    monkeypatch.setattr("atomtrain.swapping.engine.layer_times", assumed_times)
    monkeypatch.setattr("atomtrain.swapping.machines._update_parameters_per_s", lambda: 1e9)
