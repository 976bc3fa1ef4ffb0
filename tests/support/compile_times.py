"""`--compile auto` where there is no GPU: it is tried on the processor, with times that are given.

What is compiled is divided and decomposed as the real compiler does, and then runs operation by
operation: the bits are other ones, and no C++ compiler is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from atomtrain.engine.calibration import compile_choice
from atomtrain.engine.calibration.machines import assumed_machine
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.execution.compiled import CompiledLayer, compiled
from tests.support.engine_models import assumed_times

BACKEND = "aot_eager_decomp_partition"


class CompileTimes:
    """How fast compiled layers are said to be, and how often layers were compiled."""

    def __init__(self) -> None:
        self.speed_ratio = 1.0
        self.backend: str | Callable[..., Any] = BACKEND
        self.compiled = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compile_choice, "TRIED_ON", frozenset({"cpu"}))
        monkeypatch.setenv("CXX", sys.executable)  # any program: none is needed here
        monkeypatch.setattr("atomtrain.engine.api.compiled", self._compiled)
        monkeypatch.setattr("atomtrain.engine.api.take_profile", self._profile)

    def _compiled(self, *given: Any) -> Any:
        self.compiled += 1
        return compiled(*given, self.backend)  # type: ignore[arg-type]

    def _profile(self, device: Any, chain: Any, costs: Any, *_: Any, **__: Any) -> Profile:
        times = assumed_times(chain, costs)
        if any(isinstance(layer, CompiledLayer) for layer in chain.layers):
            times = {kind: time.scaled(1 / self.speed_ratio) for kind, time in times.items()}
        return Profile(assumed_machine(device), times)
