"""What the planner must know about a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atomtrain.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates and budgets of one peer's host, device and the link between them."""

    name: str
    load_bytes_per_s: float
    """Host to device."""
    unload_bytes_per_s: float
    """Device to host."""
    update_parameters_per_s: float
    """Host optimizer."""
    device_memory_bytes: int
    """Budget that is never exceeded."""
    host_memory_bytes: int

    def __post_init__(self) -> None:
        for field, value in self.__dict__.items():
            if field != "name" and not (value > 0 and math.isfinite(value)):
                raise PlanError(f"the machine's {field} is {value}; it must be positive and finite")
