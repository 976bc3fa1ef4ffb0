"""Device memory of one visit beside slots and buffers: the formulas, for one segment or for all.

The workspace of all segments that begin at a layer is computed by going up once, so that a search
over all of them costs a step each.

Legend: A micro-batches; *below* and *above*, the values that cross the segment's lower and upper
cut, for one micro-batch; *workspace*, the peak growth while one micro-batch runs through it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.shape import Activation, Boundary, Phase

Bytes = Any
"""An int, or int64 for all segments: `[start, stop]`."""


class SegmentBytes(NamedTuple):
    """What the memory of visits to a segment follows from; bytes of one micro-batch."""

    forward: Bytes
    """Workspace of forward without a graph."""
    graph: Bytes
    """Workspace of forward with a graph."""
    backward: Bytes
    """Workspace of backward, the graph included."""
    beside_graph: Bytes
    """Peak growth of backward above the graph."""
    saved: Bytes
    """What is saved for backward."""
    saved_out: Bytes
    """The part of it that lies in values above."""
    saved_forward: Bytes
    """Workspace of forward if what is saved leaves at once."""
    saved_backward: Bytes
    """Workspace of backward if what was saved comes for its first use and goes after its last."""
    below: Bytes
    above: Bytes
    largest_below: Bytes
    """The largest value below."""
    largest_above: Bytes
    largest_written: Bytes
    """The largest value at any cut above the segment's first layer, its upper one included."""
    inputs: Bytes
    """The micro-batch's own entries that the segment reads."""
    given_leaving: Bytes
    """Of gradients for layers on the host: what leaves at a time."""
    given_coming: Bytes
    """What of them comes back to be added to."""


def visit_bytes(
    phase: Phase,
    of: SegmentBytes,
    count: int,
    boundary: Boundary,
    activation: Activation,
    scratch_bytes: int,
) -> Bytes:
    """Return the peak of a visit beside what is held, the window, and other kept segments.

    Args:
        phase: Forward, turn or backward.
        of: The segment, or all.
        count: A, micro-batches.
        boundary: Where values wait.
        activation: What happens to what the segment saves; the turn has none of it.
        scratch_bytes: Of an update on the device: when a visit is over, a block may be updated in
            place of the workspace.
    """
    # This and the next micro-batch's inputs.
    ahead = min(2, count)
    inputs: Bytes = ahead * of.inputs
    if phase is Phase.FORWARD:
        kept, inner, above = 0, of.forward, of.above
        if activation == "offload":
            inner = of.saved_forward
        elif activation == "keep":
            # The other micro-batches' saved tensors; some of them are what is handed on.
            kept, inner = (count - 1) * of.saved, of.graph
            above = above - of.saved_out
        standing = np.maximum(count * of.below, of.below + kept + (count - 1) * above)
        if boundary == "host":
            standing = ahead * of.below + kept
        # One value at a time is still being saved when the next micro-batch runs.
        return inputs + standing + of.largest_written + inner
    leaving = of.given_leaving
    if boundary == "host":
        leaving = np.maximum(leaving, of.largest_below)
    busiest = np.maximum(np.maximum(of.graph, of.backward), scratch_bytes)
    if phase is Phase.TURN:
        standing = (count if boundary == "device" else ahead) * of.below
        return inputs + ahead * of.given_coming + standing + leaving + busiest
    inner, kept, values = busiest, 0, of.below
    if activation != "recompute":
        inputs = values = 0
    if activation == "offload":
        inner = np.maximum(of.saved_backward, scratch_bytes)
    elif activation == "keep":
        kept = count * of.saved
        inner = np.maximum(of.beside_graph, scratch_bytes - kept)
    inner = inner + inputs + ahead * of.given_coming
    if boundary == "device":
        # What is kept goes as the gradients of the values below come.
        rising = of.above + kept // count + (count - 1) * of.below
        standing = np.maximum(count * of.above + kept, rising)
        return standing + ahead * values + leaving + inner
    leaving = np.maximum(leaving, of.largest_above)
    return kept + ahead * (values + of.above) + leaving + inner


class Workspace(NamedTuple):
    """Peaks in bytes above what is there when the segment begins."""

    forward: int
    """Forward without a graph, outputs included, as if backward had a cut at each layer: a value
    that it starts from stays until the visit is over."""
    graph: int
    """Forward with a graph."""
    backward: int
    """Backward, the graph and the gradients of the inputs included, those of the outputs not."""


class Workspaces:
    def __init__(self, chain: Chain, costs: ChainCosts, layout: Layout) -> None:
        self._layers, self._layout = costs.layers, layout
        last_reader: dict[str, int] = {}
        for index, layer in enumerate(chain.layers):
            for name in layer.reads:
                last_reader[name] = index
        self._written = [
            [(last_reader.get(name, index), costs.values[name].held_bytes) for name in layer.writes]
            for index, layer in enumerate(chain.layers)
        ]
        self._rows: dict[int, list[Workspace]] = {}

    def of(self, start: int, stop: int) -> Workspace:
        if start not in self._rows:
            self._rows[start] = self._row(start)
        space = self._rows[start][stop - start - 1]
        extra = self._shared_gradients(start, stop)
        return space._replace(backward=extra) if extra > space.backward else space

    def _row(self, start: int) -> list[Workspace]:
        """Return the workspaces of all segments that begin at a layer, shared weights left out."""
        row = []
        forward = graph = inner = kept = alive = saved = 0
        ends: dict[int, int] = {}  # bytes of values written so far, by their last reader
        for index in range(start, len(self._layers)):
            cost = self._layers[index]
            forward = max(forward, saved + cost.forward_bytes)
            graph = max(graph, kept + cost.graph_bytes)
            kept += cost.kept_bytes
            row.append(Workspace(forward, graph, max(inner, kept + cost.backward_bytes)))
            alive -= ends.pop(index, 0)
            for last, n_bytes in self._written[index]:
                if last > index:
                    ends[last] = ends.get(last, 0) + n_bytes
                    alive += n_bytes
                    saved += n_bytes
            # Below the segment's last layer the gradients of what it writes are alive too.
            inner = max(inner, kept + alive + cost.backward_bytes)
        return row

    def shared_bytes(self, start: int, stop: int) -> int:
        """Return the most that the gradients of weights that several layers share take."""
        if not (weights := self._shared_within(start, stop)):
            return 0
        return max(_held_at(index, weights) for index in range(start, stop))

    def _shared_within(self, start: int, stop: int) -> list[_SharedWithin]:
        weights = []
        for shared in self._layout.shared:
            users = [user for user in shared.users if start <= user < stop]
            if len(users) > 1:
                # The sum goes on from what a later segment has added, in a place of its own.
                goes_on = shared.users[-1] >= stop
                n_bytes = shared.stop_bytes - shared.start_bytes
                weights.append(_SharedWithin(users, n_bytes, goes_on))
        return weights

    def _shared_gradients(self, start: int, stop: int) -> int:
        """Return the peak of backward with weights that several of the segment's layers share.

        Autograd holds such a weight's gradient from its last user in the segment until that from
        the first one is there, and adds them out of place. 0 if there are none.
        """
        weights = self._shared_within(start, stop)
        if not weights:
            return 0
        peak = kept = alive = 0
        ends: dict[int, int] = {}
        for index in range(start, stop):
            cost = self._layers[index]
            kept += cost.kept_bytes
            held = _held_at(index, weights)
            alive -= ends.pop(index, 0)
            for last, n_bytes in self._written[index]:
                if last > index:
                    ends[last] = ends.get(last, 0) + n_bytes
                    alive += n_bytes
            inside = alive if index + 1 < stop else 0
            peak = max(peak, kept + inside + held + cost.backward_bytes)
        return peak


class _SharedWithin(NamedTuple):
    """A weight that several layers of a segment share."""

    users: list[int]
    n_bytes: int
    goes_on: bool
    """Whether a later segment has begun its gradient."""


def _held_at(index: int, weights: list[_SharedWithin]) -> int:
    return sum(
        (1 + (index in users)) * n_bytes
        for users, n_bytes, goes_on in weights
        if users[0] <= index < users[-1] + goes_on
    )
