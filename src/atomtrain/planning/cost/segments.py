"""What memory and traffic of visits follow from, for every segment of a chain.

It depends on neither machine nor optimizer nor request: it is made once for a chain and its costs,
however often they are planned for. What segments save for backward, and what moving it to the host
and back needs, is computed for all that begin at a layer by going up once.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.cost.visit_memory import SegmentBytes, Workspaces
from atomtrain.planning.plan.layout import Layout


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
                n_bytes, last = self._costs.values[name].held_bytes, self._last_reader.get(name, -1)
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
                n_bytes, last = self._costs.values[name].held_bytes, self._last_reader.get(name, -1)
                if last > index:
                    alive += n_bytes
                    ends[last] += n_bytes
            above = max(above, alive + saved.backward_bytes)
        return row


Array = NDArray[np.float64]


class Rest(NamedTuple):
    """What is left of a chain for the device, or another view of it."""

    chain: Chain
    costs: ChainCosts


class Segments:
    """Bytes of every segment, for one micro-batch."""

    def __init__(self, chain: Chain, costs: ChainCosts) -> None:
        """Take a chain and its costs; the chain itself is not held."""
        self._layers, self._costs = chain.layers, costs
        self._given_names = frozenset(chain.inputs)
        self.layout = Layout(chain)
        self._workspaces = Workspaces(chain, costs, self.layout)
        self.saved = SavedTensors(chain, costs)
        """What each segment saves for backward."""
        crossing = [
            [costs.values[name] for name in chain.crossing(cut)]
            for cut in range(len(chain.layers) + 1)
        ]
        self.crossing_bytes = [sum(value.n_bytes for value in values) for values in crossing]
        """Of the values at each cut."""
        self._held_bytes = [sum(value.held_bytes for value in values) for values in crossing]
        self._largest = [max((v.held_bytes for v in values), default=0) for values in crossing]
        # What layers on the host hand on is an input here: its bytes, and who reads it.
        self._given = [
            (
                costs.values[name].n_bytes,
                [i for i, at in enumerate(chain.layers) if name in at.reads],
            )
            for name in chain.inputs
            if costs.values[name].requires_grad
        ]
        kept = (cost.kept_bytes for cost in costs.layers)
        self._kept = list(itertools.accumulate(kept, initial=0))
        self._inputs: dict[int, list[int]] = {}
        self.rests: dict[int, Rest] = {}
        """What is left without so many leading layers, as far as it was asked for."""
        self.all_sent: Rest | None = None
        """The same layers where offloading makes nothing again, if it was asked for."""

    def of(self, start: int, stop: int) -> SegmentBytes:
        space, saved = self._workspaces.of(start, stop), self.saved.of(start, stop)
        leaving, coming = self._given_gradients(start, stop)
        return SegmentBytes(
            forward=space.forward,
            graph=space.graph,
            backward=space.backward,
            beside_graph=max(0, space.backward - (self._kept[stop] - self._kept[start])),
            saved=saved.n_bytes,
            saved_out=saved.out_bytes,
            saved_forward=saved.forward,
            saved_backward=saved.backward + self._workspaces.shared_bytes(start, stop),
            below=self._held_bytes[start],
            above=self._held_bytes[stop],
            largest_below=self._largest[start],
            largest_above=self._largest[stop],
            largest_written=max(self._largest[start + 1 : stop + 1]),
            inputs=self._input_bytes(start, stop),
            given_leaving=leaving,
            given_coming=coming,
        )

    @cached_property
    def table(self) -> SegmentBytes:
        """The same of all segments, `[start, stop]` int64; 0 where there is none."""
        cuts = len(self._layers) + 1
        table = np.zeros((len(SegmentBytes._fields), cuts, cuts), np.int64)
        pairs = itertools.combinations(range(cuts), 2)
        table[(slice(None), *np.triu_indices(cuts, 1))] = np.array([self.of(*p) for p in pairs]).T
        return SegmentBytes(*table)

    @cached_property
    def saved_table(self) -> Array:
        """Bytes that segments save, `[start, stop]`; infinite where graphs cannot wait."""
        return self._saved_table(lambda of: of.n_bytes if of.movable else np.inf, np.inf)

    @cached_property
    def sent_table(self) -> Array:
        """Bytes that go to the host if segments are offloaded, `[start, stop]`; infinite where
        graphs cannot wait."""
        return self._saved_table(lambda of: of.sent_bytes if of.movable else np.inf, np.inf)

    @cached_property
    def sent_bytes(self) -> Array:
        """Bytes that would go to the host, `[start, stop]`; 0 where there is no segment."""
        return self._saved_table(lambda of: of.sent_bytes, 0.0)

    @cached_property
    def sent_storages(self) -> Array:
        """Their number of storages, `[start, stop]`."""
        return self._saved_table(lambda of: of.sent, 0.0)

    def _saved_table(self, field: Callable[[Saved], float], nothing: float) -> Array:
        cuts = len(self._layers) + 1
        table = np.full((cuts, cuts), nothing)
        pairs = itertools.combinations(range(cuts), 2)
        table[np.triu_indices(cuts, 1)] = [field(self.saved.of(*pair)) for pair in pairs]
        return table

    def _given_gradients(self, start: int, stop: int) -> tuple[int, int]:
        """Return what leaves to layers on the host at a time, and what comes back to be added to.

        They are the gradients of values that those layers handed on. They wait on the host, also
        between two segments that read the same value.
        """
        leaving = coming = 0
        for n_bytes, readers in self._given:
            if any(start <= reader < stop for reader in readers):
                leaving = max(leaving, n_bytes)
                coming += n_bytes * (readers[-1] >= stop)
        return leaving, coming

    def _input_bytes(self, start: int, stop: int) -> int:
        if start not in self._inputs:
            row, seen, total = [0], set[str](), 0
            for layer in self._layers[start:]:
                for name in layer.reads:
                    if name in self._given_names and name not in seen:
                        seen.add(name)
                        total += self._costs.values[name].held_bytes
                row.append(total)
            self._inputs[start] = row
        return self._inputs[start][stop - start]


class _Known(NamedTuple):
    chain: weakref.ref[Chain]
    costs: ChainCosts
    segments: Segments


_KNOWN: dict[int, _Known] = {}
"""By the `id` of each chain that lives."""


def sending_all(chain: Chain, costs: ChainCosts) -> Rest:
    """Return a chain of the same layers, with their costs where offloading makes nothing again;
    made when it is first asked for."""
    segments = segments_of(chain, costs)
    if segments.all_sent is None:
        segments.all_sent = Rest(dataclasses.replace(chain), costs.sending_all())
    return segments.all_sent


def segments_of(chain: Chain, costs: ChainCosts) -> Segments:
    """Return the segments of a chain, made when they are first asked for."""
    key = id(chain)
    known = _KNOWN.get(key)
    if known is None or known.chain() is not chain or known.costs is not costs:

        def gone(_: weakref.ref[Chain], known: dict[int, _Known] = _KNOWN) -> None:
            known.pop(key, None)

        known = _KNOWN[key] = _Known(weakref.ref(chain, gone), costs, Segments(chain, costs))
    return known.segments
