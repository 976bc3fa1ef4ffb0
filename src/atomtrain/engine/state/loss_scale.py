"""Dynamic loss scaling: float16 gradients are computed from a loss that is multiplied by a scale.

Float16 has no numbers below 6e-8, so small gradients would become zero. The scale is a power of
two, so dividing by it is exact. If a gradient overflows, the step is skipped as if it had not been
and the scale is halved; after many good steps in a row it is doubled (Micikevicius et al. 2018,
arXiv 1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atomtrain.errors import ConfigError, nearest

FIRST_SCALE = 65536.0
STEPS_TO_DOUBLE = 2000
_LEAST, _MOST = 2.0**-24, 2.0**60
_KEYS = ("scale", "good_steps", "skipped_steps")


class LossScale:
    """The scale and what it depends on; `decide` is told the outcome of every step."""

    def __init__(self, scale: float = FIRST_SCALE, steps_to_double: int = STEPS_TO_DOUBLE) -> None:
        check_scale(scale, steps_to_double)
        self.scale = float(scale)
        self.good_steps = 0
        """Steps since the scale was changed or a step was skipped."""
        self.skipped_steps = 0
        self._steps_to_double = steps_to_double

    def decide(self, finite: bool) -> None:
        """Take note of a step whose gradients were all finite, or not."""
        if not finite:
            self.scale = max(self.scale / 2, _LEAST)
            self.good_steps = 0
            self.skipped_steps += 1
            return
        self.good_steps += 1
        if self.good_steps == self._steps_to_double:
            self.scale = min(self.scale * 2, _MOST)
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """Return what to save, as plain JSON values."""
        return {key: getattr(self, key) for key in _KEYS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` says.

        Raises:
            ConfigError: it is not what `state` returned.
        """
        for key in state:
            if key not in _KEYS:
                raise ConfigError(f"the loss scale has no {key!r}.{nearest(key, _KEYS)}")
        if missing := [key for key in _KEYS if key not in state]:
            raise ConfigError(f"the state of the loss scale lacks {missing[0]!r}")
        check_scale(state["scale"], 1)
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])


def check_scale(scale: float, steps_to_double: int) -> None:
    """Raise a `ConfigError` if loss scaling cannot begin so."""
    if not _LEAST <= scale <= _MOST or math.frexp(scale)[0] != 0.5:
        raise ConfigError(f"loss_scale must be a power of two, such as 65536, not {scale}")
    if steps_to_double < 1:
        raise ConfigError(f"loss_scale_steps must be at least 1, not {steps_to_double}")
