"""Where every parameter lies: the one table of offsets that reader and writer share.

All layers lie one after the other in a flat host buffer, the *arena*, so that any segment is one
contiguous range and is loaded by one copy. Weights that several layers share lie behind them, one
range each. Gradients use the same table.
"""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.analysis.chain import Chain

ALIGNMENT_BYTES = 256
"""Enough for every vector unit and for CUDA's copies; equal alignment also keeps CPU kernels on
the same code path as ordinary allocations, which bit-equality needs."""


class Piece(NamedTuple):
    """A range of the arena and where it lies in the slot that its segment is loaded into."""

    start_bytes: int
    stop_bytes: int
    slot_bytes: int


class Shared(NamedTuple):
    """A weight that several layers use."""

    start_bytes: int
    stop_bytes: int
    users: tuple[int, ...]


class Layout:
    """Offsets of all parameters of a chain; the same for every peer that trains the same model."""

    def __init__(self, chain: Chain) -> None:
        self.offsets: dict[int, int] = {}
        """Byte offset of each parameter in the arena, by the parameter's `id`."""
        self.layers: list[tuple[int, int]] = []
        """The range of each layer's own parameters, in bytes."""
        self.shared: list[Shared] = []
        cursor = 0
        for layer in chain.layers:
            start = cursor
            for parameter in layer.parameters.values():
                if id(parameter) not in self.offsets and len(chain.users[id(parameter)]) == 1:
                    self.offsets[id(parameter)] = cursor
                    cursor += _aligned(parameter.numel() * parameter.element_size())
            self.layers.append((start, cursor))
        for parameter in chain.parameters:
            users = chain.users[id(parameter)]
            if len(users) > 1:
                self.offsets[id(parameter)] = cursor
                n_bytes = _aligned(parameter.numel() * parameter.element_size())
                self.shared.append(Shared(cursor, cursor + n_bytes, users))
                cursor += n_bytes
        self.total_bytes = cursor

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the ranges that layers `start` to `stop` need, with their places in a slot."""
        first, last = self.layers[start][0], self.layers[stop - 1][1]
        pieces = [Piece(first, last, 0)] if last > first else []
        cursor = last - first
        for shared in self.shared:
            if any(start <= user < stop for user in shared.users):
                pieces.append(Piece(shared.start_bytes, shared.stop_bytes, cursor))
                cursor += shared.stop_bytes - shared.start_bytes
        return pieces

    def segment_bytes(self, start: int, stop: int) -> int:
        """Return the slot bytes that layers `start` to `stop` occupy."""
        return sum(piece.stop_bytes - piece.start_bytes for piece in self.pieces(start, stop))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
