"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atomtrain.errors import ConfigError, nearest

KINDS = ("constant", "cosine", "linear", "wsd")


def check_kind(kind: str) -> None:
    """Raise a `ConfigError` if there is no schedule of this kind."""
    if kind not in KINDS:
        raise ConfigError(
            f"there is no schedule {kind!r}.{nearest(kind, KINDS)} Schedules: {', '.join(KINDS)}"
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor on the peak learning rate at each step, counted from 0.

    All begin with a linear warm-up: `(step + 1) / warmup_steps`. Then, with `x` from 0 to 1 over
    the steps that are left:

    | kind | factor after the warm-up |
    |---|---|
    | `constant` | 1 |
    | `cosine` | `final + (1 - final) * (1 + cos(pi x)) / 2` (Loshchilov and Hutter 2017) |
    | `linear` | `1 - (1 - final) * x` |
    | `wsd` | 1, then over the last `decay_steps` as `linear` (Hu et al. 2024, arXiv 2404.06395) |

    `torch.optim.lr_scheduler.LambdaLR` takes it, best as `lambda step: schedule(step)`: torch then
    saves the step, not the schedule, and a resumed run may have another one.

    From step `steps` on the factor stays at `final` (at 1 with `constant`).
    """

    kind: str = "cosine"
    """`constant`, `cosine`, `linear` or `wsd` (warm-up, stable, decay)."""
    steps: int
    """Steps of the whole run; at least 1."""
    warmup_steps: int = 0
    """Steps of the warm-up; 0 to `steps`."""
    final: float = 0.1
    """Factor at the end; 0 to 1."""
    decay_steps: int | None = None
    """Steps of the decay of `wsd`, at most those after the warm-up; `None` is a fifth of `steps`
    (but no more than those). Not for other kinds."""

    def __post_init__(self) -> None:
        check_kind(self.kind)
        _whole("steps", self.steps, 1)
        _whole("warmup_steps", self.warmup_steps, 0)
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} are more than the {self.steps} steps of the run;"
                " give fewer"
            )
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final must be a factor from 0 to 1, not {self.final}")
        if self.decay_steps is None:
            return
        if self.kind != "wsd":
            raise ConfigError(
                f"decay_steps belongs to the schedule wsd, not to {self.kind}; leave it out"
            )
        _whole("decay_steps", self.decay_steps, 0)
        if self.decay_steps > self.steps - self.warmup_steps:
            raise ConfigError(
                f"decay_steps {self.decay_steps} are more than the {self.steps - self.warmup_steps}"
                " steps after the warm-up; give fewer"
            )

    def __call__(self, step: int) -> float:
        """Return the factor at a step, from 0 to 1.

        Raises:
            ConfigError: `step` is negative.
        """
        if step < 0:
            raise ConfigError(f"a step is counted from 0, so it cannot be {step}")
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = self._progress(step)
        if self.kind == "cosine":
            return self.final + (1 - self.final) / 2 * (1 + math.cos(math.pi * progress))
        return 1 - (1 - self.final) * progress

    def _progress(self, step: int) -> float:
        length = self.steps - self.warmup_steps
        if self.kind == "wsd":
            length = (
                min(length, -(-self.steps // 5)) if self.decay_steps is None else self.decay_steps
            )
        if step >= self.steps:
            return 1.0
        start = self.steps - length
        return 0.0 if step < start else (step - start) / length


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
