"""Memory that a partition needs, in bytes: the formula behind `PlanError` and the printed plan.

The device holds slots, gradient buffers, the model's buffers, the values and gradients that stand
at a cut between two segments, and the workspace of one micro-batch. None of it grows with depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts, ValueSpec
from atomtrain.planning.layout import Layout

Boundary = Literal["device", "host"]
"""Where the values at a cut wait for the next segment."""


class Choice(NamedTuple):
    """One point of the search space."""

    bounds: tuple[int, ...]
    """Segment `s` holds layers `bounds[s]` to `bounds[s + 1]`."""
    slots: int
    gradient_buffers: int
    boundary: Boundary

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.bounds) - 1


class MemoryModel:
    """Answers what a choice needs on the device and on the host."""

    def __init__(self, chain: Chain, costs: ChainCosts, layout: Layout, micro_batches: int) -> None:
        self._chain, self._costs, self._layout = chain, costs, layout
        self.micro_batches = micro_batches
        # Layers that write to their buffers also keep them as they were, for recomputing.
        self._buffers_bytes = sum(
            cost.buffer_bytes * (1 + micro_batches * cost.changes_buffers) for cost in costs.layers
        )
        self._work: dict[tuple[int, int, Boundary], int] = {}

    def device_bytes(self, choice: Choice) -> int:
        """Return the peak on the device."""
        segments = list(zip(choice.bounds, choice.bounds[1:], strict=False))
        slot_bytes = max(self._layout.segment_bytes(*segment) for segment in segments)
        work_bytes = max(self.work_bytes(*segment, choice.boundary) for segment in segments)
        held = choice.slots + choice.gradient_buffers
        # Each micro-batch's loss, a scalar, stays until the step ends.
        return held * slot_bytes + self._buffers_bytes + work_bytes + 8 * self.micro_batches

    def host_bytes(self, choice: Choice) -> int:
        """Return parameters, gradients, two moments and the values kept for backward."""
        kept = {
            name
            for start, stop in zip(choice.bounds, choice.bounds[1:], strict=False)
            for name in self._chain.reads(start, stop)
            if name not in self._chain.inputs
        }
        return 4 * self._layout.total_bytes + self.micro_batches * self._bytes(kept)

    def saved_bytes(self, start: int) -> int:
        """Return what one micro-batch saves to the host at a cut, and fetches in backward."""
        return self._bytes(self._chain.crossing(start))

    def work_bytes(self, start: int, stop: int, boundary: Boundary) -> int:
        """Return the peak of a segment's visits without slots and gradient buffers."""
        key = (start, stop, boundary)
        if key not in self._work:
            forward, graph = self._workspace(start, stop)
            reads = self._bytes(self._chain.reads(start, stop))
            below = self._bytes(self._chain.crossing(start))
            above = self._bytes(self._chain.crossing(stop))
            if boundary == "device":
                standing = self.micro_batches * max(below, above)
                # Inputs of this and the next micro-batch are fetched beside what stands there.
                waiting = 2 * reads
            else:
                # This and the next micro-batch's values and gradients on their way in, this and
                # the last one's on their way out.
                standing = 0
                waiting = 2 * (reads + above + below)
            self._work[key] = standing + waiting + max(forward, graph)
        return self._work[key]

    def least_layer_bytes(self, index: int) -> int:
        """Return the least device bytes with which the layer alone could be a segment."""
        slot = self._layout.segment_bytes(index, index + 1)
        work = min(self.work_bytes(index, index + 1, b) for b in ("device", "host"))
        return 3 * slot + work

    def _workspace(self, start: int, stop: int) -> tuple[int, int]:
        """Return the peak growth of forward without a graph, and of forward and backward."""
        costs = self._costs.layers
        forward = graph = kept = 0
        for index in range(start, stop):
            inner = self._bytes(self._inside(start, index, stop))
            forward = max(forward, inner + costs[index].forward_bytes)
            graph = max(graph, kept + costs[index].graph_bytes)
            kept += costs[index].kept_bytes
        for index in reversed(range(start, stop)):
            above = self._bytes(self._inside(start, index + 1, stop)) if index + 1 < stop else 0
            above += self._shared_gradient_bytes(start, index, stop)
            graph = max(graph, kept + above + costs[index].backward_bytes)
            kept -= costs[index].kept_bytes
        return forward, graph

    def _shared_gradient_bytes(self, start: int, index: int, stop: int) -> int:
        """Return what the gradients of shared weights take in backward of layer `index`.

        Autograd holds a weight's gradient from its last user in the segment until that from the
        first one is there, and adds them out of place.
        """
        n_bytes = 0
        for shared in self._layout.shared:
            users = [user for user in shared.users if start <= user < stop]
            if users and users[0] <= index < users[-1]:
                n_bytes += (1 + (index in users)) * (shared.stop_bytes - shared.start_bytes)
        return n_bytes

    def _inside(self, start: int, cut: int, stop: int) -> list[str]:
        """Values that layers `start` to `cut` write and layers `cut` to `stop` read."""
        later = {name for layer in self._chain.layers[cut:stop] for name in layer.reads}
        layers = self._chain.layers[start:cut]
        return [name for layer in layers for name in layer.writes if name in later]

    def _bytes(self, names: Iterable[str]) -> int:
        values: Mapping[str, ValueSpec] = self._costs.values
        return sum(values[name].n_bytes for name in names)


def greedy_bounds(sizes: Sequence[int], cap: int) -> tuple[int, ...]:
    """Return the partition that fills each segment, from the last layer down, up to `cap`.

    The first segment gets what is left over: its load and update are the ones that no compute can
    hide, so it should be the small one.
    """
    bounds = [len(sizes)]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled and filled + sizes[index] > cap:
            bounds.append(index + 1)
            filled = 0
        filled += sizes[index]
    return (0, *reversed(bounds))
