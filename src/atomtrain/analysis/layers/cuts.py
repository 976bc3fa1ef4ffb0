"""Where a graph is cut into layers: between modules, where few bytes cross.

The size of a cut is what crosses it: values that operations before it make and operations after it
read (the cut-edge size that partitioners of computation graphs minimise).

- Modules that hold others in containers (`ModuleList`, `Sequential`) are opened: their parts become
  layers. The elements of the outermost containers are the *blocks*.
- A block is opened further only at elements of containers inside of it, and only where no more
  crosses than at its own ends.
- Operations between modules join the side where less crosses; what has no parameters, or next to
  none, joins a neighbour.
- No cut separates an operation that writes in place from what it writes to, or the users of a
  buffer that changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn

from atomtrain.analysis.export.functions import n_bytes_of, storages_of, written_by

_SMALL = 100
"""A piece outside of containers with less than this fraction of the largest's parameters joins."""


class Piece(NamedTuple):
    """A run of operations that becomes a layer."""

    name: str
    start: int
    stop: int


class _Run(NamedTuple):
    path: str | None
    start: int
    stop: int


def find_pieces(
    nodes: Sequence[fx.Node], root: nn.Module, prefix: str, sources: set[fx.Node]
) -> list[Piece]:
    """Return the pieces that the operations are cut into, in order and without gaps.

    Args:
        nodes: Operations in the order of execution.
        root: The module whose paths the operations carry, without `prefix`.
        prefix: Path of the model within what was exported.
        sources: Placeholders of parameters.
    """
    return _Cutter(nodes, root, prefix, sources).pieces()


class _Cutter:
    def __init__(
        self, nodes: Sequence[fx.Node], root: nn.Module, prefix: str, sources: set[fx.Node]
    ) -> None:
        self._nodes, self._prefix, self._sources = nodes, prefix, sources
        self._containers = {
            path
            for path, module in root.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        }
        self._calls = [self._stack(node) for node in nodes]
        self._crossing = crossing_bytes(nodes)
        self._forbidden = forbidden_cuts(nodes)
        self._weights = self._weights_per_node()

    def _stack(self, node: fx.Node) -> list[tuple[str, str]]:
        stack = (node.meta.get("nn_module_stack") or {}).items()
        found = []
        for key, (path, _) in stack:
            if path.startswith(self._prefix):
                found.append((str(key), path.removeprefix(self._prefix)))
        return found

    def _weights_per_node(self) -> list[dict[fx.Node, int]]:
        return [
            {s: n_bytes_of(s) for s in node.all_input_nodes if s in self._sources}
            for node in self._nodes
        ]

    def pieces(self) -> list[Piece]:
        cuts = sorted({0, len(self._nodes), *self._open(0, len(self._nodes), 0, None)})
        pieces = [self._piece(start, stop) for start, stop in pairwise(cuts)]
        return _with_unique_names(self._joined(pieces))

    def _open(self, start: int, stop: int, depth: int, limit: int | None) -> list[int]:
        """Return the cuts inside a module call at `depth`; `limit` is set inside of blocks."""
        runs = self._runs(start, stop, depth)
        cuts = self._between(runs, limit)
        for run in runs:
            if run.path is None or not self._holds_containers(run.path):
                continue
            inside = limit
            if self._is_element(run.path):
                inside = max(self._crossing[run.start], self._crossing[run.stop])
            cuts += self._open(run.start, run.stop, depth + 1, inside)
        return cuts

    def _runs(self, start: int, stop: int, depth: int) -> list[_Run]:
        runs: list[_Run] = []
        last: str | None = None
        for index in range(start, stop):
            stack = self._calls[index]
            key, path = stack[depth] if depth < len(stack) else (None, None)
            if runs and key == last:
                runs[-1] = runs[-1]._replace(stop=index + 1)
            else:
                runs.append(_Run(path, index, index + 1))
            last = key
        return runs

    def _between(self, runs: Sequence[_Run], limit: int | None) -> list[int]:
        modules = [run for run in runs if run.path is not None]
        cuts = []
        for before, after in pairwise(modules):
            # Behind the operations in between if as much crosses, so that a residual sum stays
            # with its block.
            allowed = [c for c in (after.start, before.stop) if not self._forbidden[c]]
            if limit is not None:
                both = self._is_element(before.path or "") and self._is_element(after.path or "")
                allowed = [c for c in allowed if both and self._crossing[c] <= limit]
            if allowed:
                cuts.append(min(allowed, key=lambda cut: self._crossing[cut]))
        return cuts

    def _is_element(self, path: str) -> bool:
        return path.rpartition(".")[0] in self._containers

    def _holds_containers(self, path: str) -> bool:
        inside = path + "." if path else ""
        return path in self._containers or any(c.startswith(inside) for c in self._containers)

    def _piece(self, start: int, stop: int) -> Piece:
        """Name a piece after the module call in it that has most parameters, outermost first."""
        best, most = "", -1
        for depth in range(max(len(stack) for stack in self._calls[start:stop])):
            for run in self._runs(start, stop, depth):
                if run.path and run.path != best and self._is_whole(run, start, stop, depth):
                    n_bytes = self._bytes(run.start, run.stop)
                    if n_bytes > most:
                        best, most = run.path, n_bytes
        if not best:
            best = self._calls[start][-1][1] if self._calls[start] else ""
        return Piece(best or "model", start, stop)

    def _is_whole(self, run: _Run, start: int, stop: int, depth: int) -> bool:
        """Return whether the module call goes on neither before nor behind the piece."""
        key = self._calls[run.start][depth][0]

        def goes_on(index: int) -> bool:
            if not 0 <= index < len(self._calls) or len(self._calls[index]) <= depth:
                return False
            return self._calls[index][depth][0] == key

        return not (
            (run.start == start and goes_on(start - 1)) or (run.stop == stop and goes_on(stop))
        )

    def _joined(self, pieces: list[Piece]) -> list[Piece]:
        """Join pieces that have next to no parameters with the neighbour to which more crosses."""
        sizes = [self._bytes(piece.start, piece.stop) for piece in pieces]
        least = max(sizes, default=0) // _SMALL
        index = 0
        while index < len(pieces) and len(pieces) > 1:
            piece = pieces[index]
            small = sizes[index] == 0 or (sizes[index] < least and not self._is_element(piece.name))
            if not small:
                index += 1
                continue
            left = self._crossing[piece.start] if index > 0 else -1
            right = self._crossing[piece.stop] if index + 1 < len(pieces) else -1
            # Rather with what follows: a normalisation belongs to what it feeds.
            first = index if right >= left else index - 1
            both = pieces[first : first + 2]
            larger = both[0] if sizes[first] >= sizes[first + 1] else both[1]
            pieces[first : first + 2] = [Piece(larger.name, both[0].start, both[1].stop)]
            sizes[first : first + 2] = [sizes[first] + sizes[first + 1]]
            index = max(0, first)
        return pieces

    def _bytes(self, start: int, stop: int) -> int:
        used: dict[fx.Node, int] = {}
        for weights in self._weights[start:stop]:
            used.update(weights)
        return sum(used.values())


def _with_unique_names(pieces: Sequence[Piece]) -> list[Piece]:
    """A module that is called twice gives two layers; the second is called `name#2`."""
    seen: dict[str, int] = {}
    named = []
    for piece in pieces:
        seen[piece.name] = count = seen.get(piece.name, 0) + 1
        named.append(piece if count == 1 else piece._replace(name=f"{piece.name}#{count}"))
    return named


def last_uses(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, int]:
    return {source: index for index, node in enumerate(nodes) for source in node.all_input_nodes}


def crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Return the bytes that cross before each operation, and 0 behind the last one."""
    last = last_uses(nodes)
    change = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        if node in last:
            change[index + 1] += n_bytes_of(node)
            change[last[node] + 1] -= n_bytes_of(node)
    sizes, total = [], 0
    for index in range(len(nodes) + 1):
        total += change[index]
        sizes.append(total)
    return sizes


def forbidden_cuts(nodes: Sequence[fx.Node]) -> list[bool]:
    """Return before which operations no cut may be."""
    forbidden = [False] * (len(nodes) + 1)

    def forbid(first: int, last: int) -> None:
        for cut in range(first + 1, last + 1):
            forbidden[cut] = True

    last = last_uses(nodes)
    touched: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if isinstance(node.meta.get("val"), tuple | list) and node in last:
            forbid(index, last[node])  # its parts are taken right behind it
        for key in storages_of(node):
            touched.setdefault(key, []).append(index)
        for source in node.all_input_nodes:
            for key in storages_of(source):
                touched.setdefault(key, []).append(index)
        for target in written_by(node):
            written.update({key: index for key in storages_of(target)})
    for key, index in written.items():
        kept = any(
            source.op == "placeholder" and key in storages_of(source)
            for where in touched[key]
            for source in nodes[where].all_input_nodes
        )
        forbid(min(touched[key]), max(touched[key]) if kept else index)
    return forbidden
