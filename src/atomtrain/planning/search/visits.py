"""Both visits to every segment of a family, where forward and backward have one partition."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.costing import Costing
from atomtrain.planning.cost.tables import VisitTable
from atomtrain.planning.plan.schedule import Phase
from atomtrain.planning.plan.shape import Activation
from atomtrain.planning.search.activation_budget import CHOICES, OFFLOAD
from atomtrain.planning.search.dp_state import CLOCKS, Clocks, Lasting
from atomtrain.planning.search.pareto_front import ABOVE, Mask, Whole
from atomtrain.planning.search.space import Family

Array = NDArray[np.float64]


class Visits:
    """Seconds of visits below the turn, and how they move the clocks of ways."""

    def __init__(self, costing: Costing, family: Family) -> None:
        """Tables are made when they are first needed: most families are never searched."""
        self._costing, self._place = costing, family.place
        self._overlap = family.slots > 1

    def forward(self, activation: Activation = "recompute") -> VisitTable:
        """Return the seconds of forward's visits."""
        return self._table(Phase.FORWARD, activation)

    def backward(self, activation: Activation = "recompute", *, load: bool = True) -> VisitTable:
        """Return the seconds of backward's; without `load` the segment is still in its slot."""
        return self._table(Phase.BACKWARD, activation, load=load)

    def most_forward_s(self) -> Array:
        """Return the seconds of forward's visits, whatever they do with what they save."""
        most: Array = self._ahead_s.max(axis=0)
        return most

    def after(
        self,
        clocks: Clocks,
        values: Array,
        cut: int,
        starts: Whole,
        choices: Whole,
        below_turn: Mask,
    ) -> tuple[Array, Array]:
        """Return the clocks after both visits as if forward's took no time, `[n, 6]`, and what
        they come later for it, `[n]`.

        Args:
            clocks: How visits move them.
            values: Of ways to a cut, as in `Ways`, `[n, 9]`.
            cut: Where the segments end.
            starts: Where each way's next segment begins, `[n]`.
            choices: What that segment does, by its place in `CHOICES`, `[n]`.
            below_turn: Whether it is the first one below the turn, `[n]`.
        """
        ahead_s, above_s = self._ahead_s[choices, starts, cut], values[:, ABOVE]
        later_s = np.maximum(ahead_s, above_s) if self._overlap else ahead_s + above_s
        return_s = self.backward("offload").return_s[starts, cut]
        lasting = Lasting.of(self.backward(), starts, cut)._replace(
            visit_s=self._back_s[1, choices, starts, cut],
            return_s=np.where(choices == OFFLOAD, return_s, 0.0),
        )
        if self._overlap and below_turn.any():
            # The last segment below the turn still is in its slot if there are two.
            hit_s = self._back_s[0, choices, starts, cut]
            lasting = lasting._replace(
                visit_s=np.where(below_turn, hit_s, lasting.visit_s),
                loading_s=np.where(below_turn, 0.0, lasting.loading_s),
            )
        return clocks.after_visit(values[:, :CLOCKS], lasting), later_s

    def _table(self, phase: Phase, activation: Activation, *, load: bool = True) -> VisitTable:
        return self._costing.table(phase, self._place, load=load, activation=activation)

    @cached_property
    def _ahead_s(self) -> Array:
        """Seconds of forward's visits, `[choice, start, stop]`."""
        return np.stack([self.forward(choice).visit_s for choice in CHOICES])

    @cached_property
    def _back_s(self) -> Array:
        """The same of backward's, `[load, choice, start, stop]`."""
        return np.stack(
            [[self.backward(c, load=load).visit_s for c in CHOICES] for load in (False, True)]
        )
