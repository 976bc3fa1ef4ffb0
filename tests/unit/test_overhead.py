"""What a visit costs is measured on a model that nothing writes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from atomtrain.swapping import overhead
from atomtrain.swapping.engine import Engine


def test_layers_are_timed_when_the_last_updates_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates write the parameters in the background, and backward refuses what was written."""
    calls: list[str] = []
    step, synchronize, layer_times = Engine.step, Engine.synchronize, overhead.layer_times

    def seen(name: str, call: Any) -> Any:
        def calling(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            calls.append(name)
            return result

        return calling

    monkeypatch.setattr(Engine, "step", seen("step", step))
    monkeypatch.setattr(Engine, "synchronize", seen("synchronize", synchronize))
    monkeypatch.setattr(overhead, "layer_times", seen("layer_times", layer_times))
    monkeypatch.setattr(overhead, "_STEPS", 1)
    assert 0 <= overhead.emulated_visit_s() < 1
    timed = calls.index("layer_times")
    assert calls[timed - 1] == "synchronize"
    assert calls[timed - 2] == "step"
