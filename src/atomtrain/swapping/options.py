"""What a user may choose about how a model is swapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atomtrain.errors import ConfigError
from atomtrain.swapping.precision import check_precision
from atomtrain.swapping.streams import Inject


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is swapped; every field has a working default."""

    micro_batches: int = 1
    """How many micro-batches a step will have. A step with more makes a new plan first."""
    segments: int | None = None
    """Number of segments, or `None` for the planner's choice."""
    slots: int | None = None
    """Number of device slots, or `None` for the planner's choice."""
    gradient_buffers: int | None = None
    """Number of gradient buffers, or `None` for the planner's choice."""
    host_layers: int | None = None
    """How many leading layers run on the host (an embedding: only the rows that tokens touch cross
    the link), or `None` for the planner's choice."""
    activations: Literal["recompute"] | None = None
    """`"recompute"`: keep no graphs from forward to backward, whatever memory there is; `None`: the
    planner keeps those of one segment where that pays."""
    clip_norm: float | None = None
    """Clip the global gradient norm, exactly, or `None`."""
    head_pieces: int | Literal["auto"] | None = None
    """In how many pieces of the vocabulary a language model's head computes its loss: more need
    less memory and a third more arithmetic there, and the result differs in its last bits. `None`
    leaves the head as the model has it, `"auto"` takes the fewest that make it need no more memory
    than other layers."""
    precision: Literal["bf16"] | None = None
    """`"bf16"`: stream and compute in bfloat16, with exact float32 masters in the optimizer's
    state (`atomtrain.optimizers.AdamW` keeps them). `None`: as the model is."""
    profile: bool = True
    """Measure this machine and the model's layers for a few seconds (once; then they are in the
    user's cache). Else a GPU's rates come from the catalogue, and the emulated device's from the
    model's FLOPs."""
    inject: Inject | None = None
    """Called before each job of each stream; tests delay transfers with it."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm must be positive, or None, not {self.clip_norm}")
        check_precision(self.precision)
        pieces = self.head_pieces
        counts = isinstance(pieces, int) and not isinstance(pieces, bool) and pieces >= 1
        if not counts and pieces not in (None, "auto"):
            raise ConfigError(
                f"head_pieces must be at least 1, 'auto', or None for the model's own head, not "
                f"{pieces!r}"
            )
