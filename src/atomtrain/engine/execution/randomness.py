"""Random numbers: every micro-batch has a stream of its own, replayed when recomputing.

The vertical schedule runs one segment for all micro-batches, then the next; ordinary training runs
one micro-batch through all layers, then the next. With a stream per micro-batch both draw the same
numbers, whatever the partition:

- A = 1: the generator simply goes on, as in an ordinary loop.
- A > 1: micro-batch `a` runs on a generator seeded with the `a`-th of `micro_batch_seeds(A)`,
  drawn from the CPU's default generator when the step begins.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_ON_CPU = threading.RLock()
"""Held while numbers are drawn from the CPU's generator, which devices on the CPU share."""


def micro_batch_seeds(micro_batches: int) -> list[int]:
    """Draw the seeds of a step with more than one micro-batch."""
    seeds: list[int] = torch.randint(2**62, (micro_batches,)).tolist()
    return seeds


class Randomness:
    """The generator states of a step's micro-batches; does nothing if no layer is random."""

    def __init__(self, generator: torch.Generator, used: bool, starts: Collection[int]) -> None:
        """`starts` are the layers at which backward begins to recompute."""
        self._generator = generator
        self._starts = frozenset(starts)
        self.used = used
        """Whether any layer draws random numbers."""
        on_cpu = used and generator.device.type == "cpu"
        self.alone: AbstractContextManager[Any] = _ON_CPU if on_cpu else nullcontext()
        """Layers run within this, from `reach` or `replay` on up to `leave`."""
        self._now: list[Tensor] = []
        self._at: dict[tuple[int, int], Tensor] = {}
        self._end: Tensor | None = None

    def begin(self, micro_batches: int, seeds: Sequence[int] | None = None) -> None:
        """Start a step.

        Args:
            micro_batches: How many there are here.
            seeds: Theirs, if the step has others elsewhere, for which seeds were drawn too.
        """
        self._at.clear()
        if not self.used:
            return
        if micro_batches == 1 and seeds is None:
            self._now, self._end = [self._generator.get_state()], None
            return
        seeds = micro_batch_seeds(micro_batches) if seeds is None else seeds
        self._end = self._generator.get_state()
        self._now = [self._generator.manual_seed(seed).get_state() for seed in seeds]
        self._generator.set_state(self._end)  # for whoever begins after this

    def reach(self, micro_batch: int, layer: int, *, first: bool) -> None:
        """Go on to a layer in forward, and remember the state where backward begins again.

        Args:
            micro_batch: Whose stream it is.
            layer: Which layer comes next.
            first: Whether another micro-batch may have run before it.
        """
        if not self.used:
            return
        if first:
            self._generator.set_state(self._now[micro_batch])
        if layer in self._starts:
            self._at[micro_batch, layer] = self._generator.get_state()

    def leave(self, micro_batch: int) -> None:
        """Note how far the stream went."""
        if self.used:
            self._now[micro_batch] = self._generator.get_state()

    def replay(self, micro_batch: int, layer: int) -> None:
        """Go back to where forward reached a layer."""
        if self.used:
            self._generator.set_state(self._at.pop((micro_batch, layer)))

    def finish(self) -> None:
        """Leave the generator where an ordinary loop would leave it."""
        if self.used:
            with self.alone:
                self._generator.set_state(self._now[0] if self._end is None else self._end)
