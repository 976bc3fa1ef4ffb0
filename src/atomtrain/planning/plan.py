"""The plan: a frozen, serialisable answer to "how is this model trained on this machine?"."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from atomtrain.errors import PlanError
from atomtrain.planning.memory import Boundary
from atomtrain.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller fixes beforehand."""

    micro_batches: int
    """A, forward calls a step, at least 1."""
    segments: int | None = None
    """Number of segments, or `None` for the planner's choice."""
    slots: int | None = None
    """Device slots, or `None` for the planner's choice of two or three."""
    gradient_buffers: int | None = None
    """Gradient buffers, or `None` for the planner's choice of one or two."""

    def __post_init__(self) -> None:
        for name in ("micro_batches", "segments", "slots", "gradient_buffers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Partition and schedule, with the cost that was predicted for them."""

    bounds: tuple[int, ...]
    """Segment `s` holds layers `bounds[s]` to `bounds[s + 1]`."""
    slots: int
    gradient_buffers: int
    boundary: Boundary
    """Where values at a cut wait for the next segment."""
    micro_batches: int
    slot_bytes: int
    device_peak_bytes: int
    """Predicted; never below the measured peak."""
    device_memory_bytes: int
    """The budget."""
    host_bytes: int
    """Parameters, gradients, optimizer state and values kept for backward."""
    step_s: float
    """Predicted."""
    compute_s: float
    """Predicted busy time of the device in a step."""
    load_s: float
    unload_s: float
    update_s: float
    bound: str
    """The resource that is busiest."""

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.bounds) - 1

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def describe(self) -> str:
        """Return the plan as a few lines for people."""
        sizes = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        layers = "+".join(map(str, sizes)) if len(sizes) <= 12 else f"{min(sizes)} to {max(sizes)}"
        where = "on the device" if self.boundary == "device" else "on the host"
        return "\n".join(
            (
                f"segments   {self.segments} (layers {layers}), {self.slots} slots of "
                f"{format_bytes(self.slot_bytes)}, {self.gradient_buffers} gradient buffers, "
                f"activations between segments wait {where}",
                f"device     {format_bytes(self.device_peak_bytes)} predicted peak of "
                f"{format_bytes(self.device_memory_bytes)}",
                f"host       {format_bytes(self.host_bytes)}",
                f"step       {format_seconds(self.step_s)} predicted for {self.micro_batches} "
                f"micro-batches: compute {format_seconds(self.compute_s)}, load "
                f"{format_seconds(self.load_s)}, unload {format_seconds(self.unload_s)}, update "
                f"{format_seconds(self.update_s)}; bound by {self.bound}",
            )
        )
