"""Profiles that a test changes, so that the planner would choose another plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from atomtrain.engine.calibration.machines import assumed_machine
from atomtrain.engine.calibration.profiling import Profile
from tests.support.engine_models import assumed_times

SLOW_VISIT_S = 1.0


class ChangingProfile:
    """What is measured: visits cost nothing, so there are several, or much, so there is one."""

    def __init__(self) -> None:
        self.several = True

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("atomtrain.engine.api.take_profile", self._profile)

    def _profile(self, device: Any, chain: Any, costs: Any, *_: Any, **__: Any) -> Profile:
        machine = assumed_machine(device)
        rates: dict[str, Any] = {"visit_s": 0.0 if self.several else SLOW_VISIT_S}
        # So updates are the host's, and layers the device's.
        rates |= {"device_update_parameters_per_s": 1.0, "host_copy_bytes_per_s": 1.0}
        if self.several:  # loads that only several segments hide
            rates |= {"load_bytes_per_s": 1e6, "unload_bytes_per_s": 1e6}
        return Profile(dataclasses.replace(machine, **rates), assumed_times(chain, costs))
