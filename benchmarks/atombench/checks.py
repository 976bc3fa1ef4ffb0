"""Checks of what a benchmark is given, alike for all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from atomtrain.errors import ConfigError


def require_positive(setup: Any, but: Collection[str] = ("seed",)) -> None:
    """Check that the numbers of a setup are above 0, except for those named.

    Fields that are no numbers, truth values among them, are not looked at.

    Raises:
        ConfigError: names the field, and says what is allowed.
    """
    for name, value in vars(setup).items():
        if name in but or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not value > 0:  # nor NaN
            allowed = "at least 1" if isinstance(value, int) else "above 0"
            raise ConfigError(f"{name} must be {allowed}, not {value}")
