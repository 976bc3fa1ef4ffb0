"""What a run's steps took, beside what its plan predicted: a profile that misleads is not kept."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

from atomtrain.engine.calibration.profile_cache import ProfileCache, machine_key, profile_folder
from atomtrain.engine.devices.device import Device

MOST_OFF_SHARE = 0.25
"""Of the prediction; beyond it the profile is doubted."""
_SLOW_STEPS, _LEAST_STEPS = 2, 5
"""The first steps make what later ones find, and fewer later ones say little."""
_MOST_STEPS = 1000


class StepTimes:
    """The newest steps of a run, without its slow first ones."""

    def __init__(self) -> None:
        self._seen = 0
        self._times_s: deque[float] = deque(maxlen=_MOST_STEPS)

    def note(self, step_s: float) -> None:
        """Hear what a step took."""
        self._seen += 1
        if self._seen > _SLOW_STEPS:
            self._times_s.append(step_s)

    @property
    def steady_s(self) -> float | None:
        """What a step takes usually; `None` as long as there are too few."""
        if len(self._times_s) < _LEAST_STEPS:
            return None
        return statistics.median(self._times_s)


def is_off(predicted_s: float, measured_s: float) -> bool:
    """Return whether steps are so much longer or shorter that their profile is to be doubted."""
    return abs(measured_s - predicted_s) > MOST_OFF_SHARE * predicted_s


def doubt_profile(device: Device, folder: Path | None = None) -> bool:
    """Have a machine measured anew at the next start; return whether it will be.

    It is not if that was done already for this reason: then the profile is not what is wrong.

    Args:
        device: Whose profile it is.
        folder: Of the cache; `None` is the user's.
    """
    cache = ProfileCache(folder or profile_folder(), machine_key(device))
    with cache.turn():
        cache.reload()
        if not cache.doubt():
            return False
        cache.save()
    return True
