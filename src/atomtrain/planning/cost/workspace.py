"""Peak growth of device memory while one micro-batch runs through a segment.

Computed for all segments that begin at a layer by going up once, so that a search over all of them
costs a step each.
"""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.layout import Layout


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
    """The workspace of every segment of a chain."""

    def __init__(self, chain: Chain, costs: ChainCosts, layout: Layout) -> None:
        self._layers, self._layout = costs.layers, layout
        last_reader: dict[str, int] = {}
        for index, layer in enumerate(chain.layers):
            for name in layer.reads:
                last_reader[name] = index
        self._written = [
            [(last_reader.get(name, index), costs.values[name].n_bytes) for name in layer.writes]
            for index, layer in enumerate(chain.layers)
        ]
        self._rows: dict[int, list[Workspace]] = {}

    def of(self, start: int, stop: int) -> Workspace:
        """Return the workspace of layers `start` to `stop`."""
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

    def _shared_gradients(self, start: int, stop: int) -> int:
        """Return the peak of backward with weights that several of the segment's layers share.

        Autograd holds such a weight's gradient from its last user in the segment until that from
        the first one is there, and adds them out of place. 0 if there are none.
        """
        weights = []
        for shared in self._layout.shared:
            users = [user for user in shared.users if start <= user < stop]
            if len(users) > 1:
                weights.append((users, shared.stop_bytes - shared.start_bytes))
        if not weights:
            return 0
        peak = kept = alive = 0
        ends: dict[int, int] = {}
        for index in range(start, stop):
            cost = self._layers[index]
            kept += cost.kept_bytes
            held = sum(
                (1 + (index in users)) * n_bytes
                for users, n_bytes in weights
                if users[0] <= index < users[-1]
            )
            alive -= ends.pop(index, 0)
            for last, n_bytes in self._written[index]:
                if last > index:
                    ends[last] = ends.get(last, 0) + n_bytes
                    alive += n_bytes
            inside = alive if index + 1 < stop else 0
            peak = max(peak, kept + inside + held + cost.backward_bytes)
        return peak
