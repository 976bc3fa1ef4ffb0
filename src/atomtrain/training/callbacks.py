"""What a callback of `Trainer` is told, and what it may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from atomtrain.training.trainer import Trainer


@dataclass
class Course:
    """Where a training is, and how it came there."""

    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Of the whole training."""
    epoch: float = 0.0
    """Passes over the data, with fractions."""
    losses: list[float] = field(default_factory=list)
    """Of each step, in nats per token for a language model."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss of each evaluation."""
    stop: bool = False
    """Set it to end the training after this step."""


class Callback:
    """Base of callbacks: override what you need. All run on the training thread."""

    def on_train_begin(self, trainer: Trainer, course: Course) -> None:
        """The engine is open; no step has run."""

    def on_step_end(self, trainer: Trainer, course: Course, loss: float) -> None:
        """A step has ended; its updates may still run on the host."""

    def on_evaluate(self, trainer: Trainer, course: Course, loss: float) -> None:
        """An evaluation has ended."""

    def on_save(self, trainer: Trainer, course: Course, path: Path) -> None:
        """A checkpoint has been written to `path`."""

    def on_train_end(self, trainer: Trainer, course: Course) -> None:
        """The last step has ended, and everything is saved."""
