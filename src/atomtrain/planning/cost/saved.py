"""Bytes that segments save for backward, and what moving them to the host and back needs.

Computed for all segments that begin at a layer by going up once.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain


class Saved(NamedTuple):
    """What one micro-batch saves in a segment, by storage."""

    n_bytes: int
    sent_bytes: int
    """Of `n_bytes`, those that go to the host if the segment is offloaded; the rest is made again
    (`analysis/costs/rematerialization.py`)."""
    sent: int
    """Number of the storages that go."""
    out_bytes: int
    """Of `n_bytes`, those that lie in values that the segment hands on."""
    forward: int
    """Peak growth of forward with a graph, in bytes, if what is saved leaves at once."""
    backward: int
    """Peak growth of backward if each storage comes for its first use and goes after its last."""
    movable: bool
    """Whether the segment's graphs can wait for backward while its slot serves others."""


class SavedTensors:
    """What every segment of a chain saves."""

    def __init__(self, chain: Chain, costs: ChainCosts) -> None:
        self._layers, self._costs = chain.layers, costs
        self._last_reader: dict[str, int] = {}
        for index, layer in enumerate(chain.layers):
            for name in layer.reads:
                self._last_reader[name] = index
        self._rows: dict[int, list[Saved]] = {}
        self.inner_bytes = [cost.saved.inner_bytes for cost in costs.layers]
        """Of each layer, what it saves beside values; no segment saves less."""
        self.inner_sent_bytes = [cost.saved.sent_bytes for cost in costs.layers]
        """The same of what it sends if it is offloaded."""

    @cached_property
    def window_bytes(self) -> int:
        """What may be on its way to the host, or back ahead of its use, at a time: as much as one
        micro-batch sends in the layer that sends most, so that a layer's work hides each transfer.
        The last layer is always in the turn, which sends nothing.
        """
        able = [i for i, cost in enumerate(self._costs.layers[:-1]) if cost.saved.movable]
        return max((self.of(i, i + 1).sent_bytes for i in able), default=0)

    def of(self, start: int, stop: int) -> Saved:
        """Return what layers `start` to `stop` save."""
        if start not in self._rows:
            self._rows[start] = self._row(start)
        return self._rows[start][stop - start - 1]

    def _row(self, start: int) -> list[Saved]:
        row = []
        inner = sent = storages = forward = above = alive = shared = values = out = 0
        movable = True
        saved_names, written = set[str](), set[str]()
        # Bytes of values written so far, and of those that are saved too, by their last reader.
        ends, ends_out = Counter[int](), Counter[int]()
        for index in range(start, len(self._layers)):
            layer, saved = self._layers[index], self._costs.layers[index].saved
            movable = movable and saved.movable
            inner += saved.inner_bytes
            sent += saved.sent_bytes
            storages += saved.sent
            forward = max(forward, alive + saved.forward_bytes)
            alive -= ends.pop(index, 0)
            out -= ends_out.pop(index, 0)
            written.update(layer.writes)
            for name, is_saved in zip(
                (*layer.reads, *layer.writes), (*saved.reads, *saved.writes), strict=True
            ):
                if not is_saved:
                    continue
                n_bytes, last = self._costs.values[name].n_bytes, self._last_reader.get(name, -1)
                if name in saved_names:
                    # Where several layers save a value it stays from the first use to the last.
                    shared += n_bytes
                    continue
                saved_names.add(name)
                values += n_bytes
                if last > index and name in written:
                    out += n_bytes
                    ends_out[last] += n_bytes
            # Gradients of what the segment writes are counted by its cuts.
            backward = max(above, saved.backward_bytes) + shared
            row.append(
                Saved(
                    n_bytes=inner + values,
                    sent_bytes=sent + values,
                    sent=storages + len(saved_names),
                    out_bytes=out,
                    forward=forward,
                    backward=backward,
                    movable=movable,
                )
            )
            for name in layer.writes:
                n_bytes, last = self._costs.values[name].n_bytes, self._last_reader.get(name, -1)
                if last > index:
                    alive += n_bytes
                    ends[last] += n_bytes
            above = max(above, alive + saved.backward_bytes)
        return row
