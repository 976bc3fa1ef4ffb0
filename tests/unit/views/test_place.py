"""This machine as a place to plan for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atomtrain.engine.calibration.machines import assumed_machine
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.views.plans import subject as place


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_products_are_timed_in_the_type_that_layers_compute_in(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search leaves out what even this rate cannot make fast enough: it must not be slower."""
    asked = []

    def rate(device: torch.device, synchronize: Any, of: torch.dtype = torch.float32) -> float:
        asked.append(of)
        return 1e9 if of is torch.float32 else 16e9

    monkeypatch.setattr(place, "flops_per_s", rate)
    monkeypatch.setattr(
        place, "profiled_machine", lambda device, *_, **__: Profile(assumed_machine(device), {})
    )
    local = place.this_place(1 << 30, precision).local
    assert local is not None
    assert asked == [dtype]
    assert local.flops_per_s == (1e9 if precision == "fp32" else 16e9)
