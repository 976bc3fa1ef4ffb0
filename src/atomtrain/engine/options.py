"""What a user may choose about how a model is swapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atomtrain.errors import ConfigError
from atomtrain.settings import check_size, count, option
from atomtrain.units import parse_bytes

if TYPE_CHECKING:
    from atomtrain.planning.plan.shape import Activation


def check_compile(flag: str, value: object) -> None:
    """Refuse what does not say whether to compile."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"{flag} must be 'auto', True (on) or False (off), not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is swapped; every field has a working default.

    Fields with a help text are options of `atom train`.
    """

    micro_batches: int = 1
    """How many micro-batches a step will have, on all devices together. A step with more makes a
    new plan first."""
    segments: int | None = None
    """Number of segments, or `None` for the planner's choice."""
    slots: int | None = None
    """Number of device slots, or `None` for the planner's choice of one or two."""
    gradient_buffers: int | None = None
    """Number of gradient buffers, or `None` for the planner's choice."""
    host_layers: int | None = None
    """How many leading layers run on the host (an embedding: only the rows that tokens touch cross
    the link), or `None` for the planner's choice."""
    activations: Activation | None = None
    """What every segment does with what its forward saves for backward: `"recompute"` it, `"keep"`
    it on the device, or `"offload"` it to the host meanwhile; a segment that cannot recomputes.
    `None`: the planner chooses for each segment."""
    optimizer_on_device: bool | None = None
    """`True`: the whole model, its gradients and the optimizer's state stay on the device, as in
    ordinary training; `False`: the optimizer runs on the host; `None`: the planner chooses for
    each block."""
    clip_norm: float | None = None
    """Clip the global gradient norm, exactly, or `None`."""
    head_pieces: int | Literal["auto"] | None = option(
        None,
        "Pieces of the vocabulary in which the head computes its loss: more need less device "
        "memory. Default: whole if that fits, else the fewest that do.",
        "N",
        check=count(),
    )
    """Pieces take a third more arithmetic in the head, and the result differs in its last bits.
    `None` leaves the head as the model has it, `"auto"` takes the fewest that make it need no more
    memory than other layers."""
    precision: Literal["bf16", "fp16"] | None = None
    """`"bf16"`: stream and compute in bfloat16, with exact float32 masters in the optimizer's
    state (`atomtrain.optimizers.AdamW` keeps them). `"fp16"`: in float16, with a loss that is
    scaled. `None`: as the model is."""
    gradient_dtype: Literal["float32"] | None = None
    """`"float32"`: gradients of parameters of 16 bits add up, cross the link and wait on the host
    as float32; `None`: in the parameters' own type."""
    loss_scale: float = 65536.0
    """With `fp16`: by what the loss is multiplied at first, a power of two."""
    loss_scale_steps: int = 2000
    """With `fp16`: after how many steps without overflow the scale is doubled; at least 1."""
    spend_gradients: bool = option(
        False,
        "Gradients wait on the host for their own update only: 2 or 4 bytes of host memory a "
        "parameter less. With --clip-norm 0.",
        "",
    )
    """They have two staging buffers of the largest segment's size instead of a place for each.
    Backward then waits where updates are slower. Without clipping or loss scaling, on one device;
    where device and host memory are one it is always so."""
    host_memory: str | int | None = option(
        None,
        "Host memory for the model, such as 8GiB. Default: all of this machine's.",
        "SIZE",
        check=check_size,
    )
    disk: str | Path | None = option(
        None,
        "Folder on a fast local disk for the part of the optimizer state, then of the parameters, "
        "that host memory cannot hold.",
        "FOLDER",
    )
    on_disk: Literal["nothing", "moments", "masters", "parameters"] | None = option(
        None,
        "State that is on disk: nothing, moments, masters (and moments) or parameters (and "
        "both). Default: as little as host memory demands.",
        "KIND",
    )
    compile: bool | Literal["auto"] = option(
        "auto",
        "Compile each kind of layer once with torch.compile, for a GPU by Triton, for the CPU by a "
        "C++ compiler (g++ or clang++): on, off, or auto: on one GPU, if that is at least 5% "
        "faster in the profile. The last bits of the result differ from those without it.",
        "WHEN",
        check=check_compile,
    )
    """`"auto"` compiles nothing for a processor (the emulated device too), several devices,
    deterministic runs, where images may become larger than the example's, or without a profile.
    `Engine.compiling` says what was chosen: who trains on from what he saved gives that again, for
    the same bits."""
    deterministic: bool = option(
        False,
        "Choose GPU kernels that give the same bits in each run; slower, and models with an "
        "operation that has none are refused.",
        "",
    )
    """Turns `torch.use_deterministic_algorithms` on for the whole process until the engine is
    closed. On a GPU `host_layers` and `optimizer_on_device` of `None` are then 0 and `False`, so
    that bits do not depend on the plan. On the processor training has the same bits in each run in
    any case."""
    plan: Mapping[str, Any] | None = None
    """What `Engine.kept_plan` gave of a training that goes on, for the same bits: its plan is taken
    without a search if it was made for the same and fits. `Engine.planner.before` says so, or why
    not."""
    profile: bool | Literal["again"] = True
    """Measure this machine and the model's layers for a few seconds (once; then they are in the
    user's cache); `"again"` forgets what the cache has, and `plan`. `False`: a GPU's rates come
    from the catalogue, and the emulated device's from the model's FLOPs."""
    check_model: bool = False
    """Compare the layers that are found with the model: loss and gradients of the example, bit for
    bit, on the processor; `AnalysisError` if they differ. Takes about two micro-batches of the
    whole model and memory for two sets of its gradients."""

    @property
    def waits(self) -> bool:
        """Whether updates wait for the norm of all gradients: to clip, or to find overflows."""
        return self.clip_norm is not None or self.precision == "fp16"

    @property
    def rescales(self) -> bool:
        """Whether updates multiply gradients in their own type: to clip, unless the loss is scaled,
        whose factor takes the coefficient in."""
        return self.clip_norm is not None and self.precision != "fp16"

    def __post_init__(self) -> None:
        # Declaring is light; whoever makes options for an engine has torch.
        from atomtrain.engine.state.precision import check_precision, check_scale
        from atomtrain.planning.plan.disk import on_disk_up_to
        from atomtrain.planning.plan.kept import KeptPlan
        from atomtrain.planning.plan.shape import ACTIVATIONS

        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm must be positive, or None, not {self.clip_norm}")
        if self.activations not in (None, *ACTIVATIONS):
            raise ConfigError(
                f"activations must be {', '.join(map(repr, ACTIVATIONS))} or None, not "
                f"{self.activations!r}"
            )
        if self.profile not in (True, False, "again"):
            raise ConfigError(f"profile must be True, False or 'again', not {self.profile!r}")
        check_compile("compile", self.compile)
        if self.plan is not None:
            KeptPlan.from_json(self.plan)
        check_precision(self.precision)
        if self.gradient_dtype not in (None, "float32"):
            raise ConfigError(
                f"gradient_dtype must be 'float32', or None for the parameters' own type, not "
                f"{self.gradient_dtype!r}"
            )
        check_scale(self.loss_scale, self.loss_scale_steps)
        if self.spend_gradients and self.waits:
            raise ConfigError(
                "spend_gradients needs updates that wait for no other gradient; leave out "
                f"{'clip_norm' if self.clip_norm is not None else 'fp16'}, or spend_gradients"
            )
        if self.host_memory is not None:
            parse_bytes(self.host_memory, "host memory")
        if self.on_disk is not None:
            on_disk_up_to(self.on_disk)
            if self.disk is None and self.on_disk != "nothing":
                raise ConfigError(
                    f"on_disk={self.on_disk!r} needs a folder; give disk='FOLDER' too"
                )
        pieces = self.head_pieces
        counts = isinstance(pieces, int) and not isinstance(pieces, bool) and pieces >= 1
        if not counts and pieces not in (None, "auto"):
            raise ConfigError(
                f"head_pieces must be at least 1, 'auto', or None for the model's own head, not "
                f"{pieces!r}"
            )
