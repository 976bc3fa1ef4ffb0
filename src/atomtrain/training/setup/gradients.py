"""Gradient averaging between engine and swarm: gradients add up, rounds take their mean.

The engine's optimizer only collects; the step itself is what a round applies to the swarm's anchor
(`atomtrain.swarm.anchors.updates`), and the new parameters come back with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atomtrain.engine.engine import Engine
from atomtrain.optimizers import decay_groups
from atomtrain.training.config.optimizing import BETAS
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.peering import EngineFragments

if TYPE_CHECKING:
    from atomtrain.swarm.anchors.updates import AdamWUpdate

_SUM = "sum"
_FLOAT32_BYTES = 4


class GradientCollector(torch.optim.Optimizer):
    """Adds gradients up in float32 and leaves the parameters alone."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if _SUM not in state:
                    state[_SUM] = torch.zeros_like(parameter, dtype=torch.float32)
                state[_SUM].add_(parameter.grad)

    def state_bytes_of(self, parameter: Tensor) -> int:
        return _FLOAT32_BYTES * parameter.numel()

    def scratch_bytes(self, *, on_gpu: bool = False) -> int:
        return 0


class GradientFragments(EngineFragments):
    """The whole model as one fragment, with its mean gradient."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, most=1)
        self._steps = 0

    def note_step(self) -> None:
        """Hear that the engine has added another step's gradient."""
        self._steps += 1

    @contextmanager
    def gradient(self, index: int) -> Iterator[Tensor]:
        """Lend the mean gradient since `forget`; between two steps only."""
        (start, stop), flat = (
            self._ranges[index],
            torch.zeros(self.elements[index], dtype=torch.float32),
        )
        self._engine.synchronize()
        for parameter, first in self._engine.fragment_places(start, stop):
            total = self._total(parameter)
            if total is not None and self._steps:
                part = flat[first : first + parameter.numel()].view(parameter.shape)
                torch.div(total, self._steps, out=part)
        yield flat

    def forget(self, index: int) -> None:
        """Begin to add up anew."""
        self._engine.synchronize()
        for parameter, _ in self._engine.fragment_places(*self._ranges[index]):
            total = self._total(parameter)
            if total is not None:
                # Not only in place: where it adds up on the device, too, that has to know.
                self._engine.masters.set_moments(parameter, {_SUM: total.zero_()})
        self._steps = 0

    def decayed(self, model: nn.Module) -> list[tuple[int, int]]:
        """Return the spans of elements that weight decay concerns."""
        kept = {
            id(parameter)
            for group in decay_groups(model, 1.0)
            if group["weight_decay"]
            for parameter in group["params"]
        }
        places = self._engine.fragment_places(*self._ranges[0])
        return [(first, first + p.numel()) for p, first in places if id(p) in kept]

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
        moments: dict[str, Any] = self._engine.masters.moments(parameter)
        return moments.get(_SUM)


def step_of(recipe: Recipe, model: nn.Module, fragments: GradientFragments) -> AdamWUpdate:
    """Return the step that all peers of a run make with a mean gradient.

    `recipe` is that of the run's manifest, whatever this peer was told.
    """
    from atomtrain.swarm.anchors.updates import AdamWUpdate
    from atomtrain.swarm.codecs.slices import Span

    return AdamWUpdate(
        learning_rate_at=recipe.learning_rate_at,
        decayed=[[Span(*ends) for ends in fragments.decayed(model)]],
        weight_decay=recipe.weight_decay,
        betas=BETAS,
    )
