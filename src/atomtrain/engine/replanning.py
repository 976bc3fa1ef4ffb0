"""Measures again within a run, once other programs leave a machine alone that was crowded before.

A profile that was taken beside others predicts steps that are too long, and may have led to a plan
that is slower than another one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atomtrain.analysis.layers.trace import MicroBatch
from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration.profiling import (
    CROWDED_SHARE,
    Profile,
    Watch,
    crowded_now,
    take_profile,
)
from atomtrain.engine.engine import Engine

FASTER = 1.05
"""How many times as fast another plan must be: less may be the noise of measurements."""
_WATCHED_S = 10.0
"""How long others must leave the processor alone. Steps go on meanwhile."""


class PlannedAgain(NamedTuple):
    """What a new profile brought."""

    changed: bool
    """Whether another plan is followed now."""
    predicted_before_s: float
    """What a step was predicted to take until now."""


class Replanning:
    """Looks between the steps of an engine whether to measure again."""

    def __init__(self) -> None:
        self._begin()

    def between_steps(
        self, engine: Engine, micro_batches: Sequence[MicroBatch]
    ) -> PlannedAgain | None:
        """Measure and plan again if it is time to; `None` if nothing was measured.

        That takes some seconds, and comes once in most runs: what was measured on a quiet machine
        is not measured again.

        Args:
            engine: The same each time.
            micro_batches: Of any step; the first one is measured with.

        Raises:
            PlanError: the device's memory is too little to measure in.
        """
        if time.monotonic() - self._since_s < _WATCHED_S:
            return None
        share = engine.planner.crowded_share
        if share <= CROWDED_SHARE:
            return None
        alone = self._watch.crowded_share() < share / 2
        self._begin()
        # The second look is what the profile itself goes by.
        if not (alone and engine.can_plan_again and crowded_now() < share / 2):
            return None

        def measure(inputs: Mapping[str, Any]) -> Profile:
            planner = engine.planner
            chain, costs = planner.chain, planner.costs
            return take_profile(engine.device, chain, costs, inputs, measured_overhead)

        before_s = engine.plan.step_s
        changed = engine.plan_by(measure, micro_batches[0], FASTER)
        self._begin()
        if engine.planner.crowded_share == share:
            return None  # others were back already, so nothing was measured
        return PlannedAgain(changed, before_s)

    def _begin(self) -> None:
        self._watch, self._since_s = Watch(), time.monotonic()
