"""The outer update: what a round's mean change does to the anchor.

Each operation rounds once per element, so that every machine computes the same bits: no fused
multiply-add, whose use depends on the processor, and no reduction, whose order does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class OuterUpdate:
    """Nesterov momentum on anchors, with the mean change as the negative gradient.

    With the defaults it is plain averaging: the new anchor is the old one plus the mean change.
    """

    learning_rate: float = 1.0
    """Factor on the change; above 0, at most 2."""
    momentum: float = 0.0
    """Share of the last change that is kept; at least 0, below 1. 0 needs no velocity."""

    def apply(
        self, anchor: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor | None
    ) -> None:
        """Update `anchor` (and `velocity`, needed when there is momentum) in place.

        All are 1-D float32 of one length; `mean` is the weighted mean of local minus anchor.
        """
        change = mean
        if self.momentum:
            assert velocity is not None, "momentum needs a velocity"
            velocity.mul_(self.momentum).add_(mean)
            change = velocity.mul(self.momentum).add_(mean)
        if self.learning_rate != 1.0:
            change = change.mul(self.learning_rate)
        anchor.add_(change)
