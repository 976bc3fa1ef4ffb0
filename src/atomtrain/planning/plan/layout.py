"""Where every parameter lies: the one table of offsets that reader and writer share.

All layers lie one after the other in a flat host buffer, the *arena*, so that any segment is one
contiguous range and is loaded by one copy. Weights that several layers share lie behind them, one
range each. Gradients have a table of the same kind, in which frozen parameters take no room; where
all parameters are trainable it is the same one. Gradients may be wider than parameters: then all
of their table is to be multiplied by `gradient_factor`.

A *block* is what is updated at once: a layer's own parameters, or one shared weight.

Without clipping a gradient is spent as soon as it came. Then a few *staging buffers* on the host
will do, each as large as the largest segment's gradients, which backward's segments take in turn: a
segment's gradients leave the device once the update of the one that had the buffer before is done.
What adds up on the host keeps a place of its own: weights that several segments share, unless they
are resident, and those of layers on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.shape import Layers, Shape

ALIGNMENT_BYTES = 128
"""Enough for every vector unit and for CUDA's copies; equal alignment also keeps CPU kernels on
the same code path as ordinary allocations, which bit-equality needs."""
_ALIGNMENT_ELEMENTS = 64
"""So that trainable parameters of 16 bits have the same places, in elements, as those of float32:
peers that compute in either divide the model alike."""


class Piece(NamedTuple):
    start_bytes: int
    stop_bytes: int
    slot_bytes: int


class Shared(NamedTuple):
    start_bytes: int
    stop_bytes: int
    users: tuple[int, ...]


class Layout:
    """Offsets of all parameters of a chain; the same for every peer that trains the same model."""

    def __init__(self, chain: Chain, *, trainable: bool = False) -> None:
        """Lay out all parameters, or the `trainable` ones only."""
        frozen = any(not parameter.requires_grad for parameter in chain.parameters)
        self.gradients: Layout = Layout(chain, trainable=True) if frozen and not trainable else self
        """Where gradients lie, with the same numbers of blocks."""
        self.gradient_factor = chain.gradient_factor
        """What offsets and sizes of `gradients` are multiplied by."""
        self.offsets: dict[int, int] = {}
        """Byte offset of each parameter in the arena, by the parameter's `id`. A table of gradients
        has the trainable ones only."""
        self.block_of: dict[int, int] = {}
        """The block in which each of these parameters lies, by the parameter's `id`."""
        self.layers: list[tuple[int, int]] = []
        """The range of each layer's own parameters, in bytes."""
        self.shared: list[Shared] = []
        cursor = 0
        for index, layer in enumerate(chain.layers):
            start = cursor
            for parameter in layer.parameters.values():
                if trainable and not parameter.requires_grad:
                    continue
                if id(parameter) not in self.offsets and len(chain.users[id(parameter)]) == 1:
                    self.offsets[id(parameter)], self.block_of[id(parameter)] = cursor, index
                    cursor += _aligned_bytes(parameter)
            self.layers.append((start, cursor))
        for parameter in chain.parameters:
            users = chain.users[id(parameter)]
            if len(users) > 1:
                n_bytes = _aligned_bytes(parameter)
                if trainable and not parameter.requires_grad:
                    n_bytes = 0
                else:
                    self.offsets[id(parameter)] = cursor
                    self.block_of[id(parameter)] = self.blocks
                self.shared.append(Shared(cursor, cursor + n_bytes, users))
                cursor += n_bytes
        self.total_bytes = cursor

    @property
    def blocks(self) -> int:
        """Number of blocks: each layer's own parameters, then each shared weight."""
        return len(self.layers) + len(self.shared)

    def block_range(self, block: int) -> tuple[int, int]:
        """Return where a block lies in the arena, in bytes."""
        if block < len(self.layers):
            return self.layers[block]
        shared = self.shared[block - len(self.layers)]
        return shared.start_bytes, shared.stop_bytes

    def gradient_range(self, block: int) -> tuple[int, int]:
        """Return where a block's gradients lie in the arena of gradients, in bytes."""
        start, stop = self.gradients.block_range(block)
        return self.gradient_factor * start, self.gradient_factor * stop

    @property
    def arena_bytes(self) -> int:
        """Bytes of all parameters and all gradients."""
        return self.total_bytes + self.gradient_factor * self.gradients.total_bytes

    def block_arena_bytes(self, block: int) -> int:
        """Return the bytes of a block and its gradients."""
        start, stop = self.gradient_range(block)
        return self.block_bytes(block) + stop - start

    def block_bytes(self, block: int) -> int:
        start, stop = self.block_range(block)
        return stop - start

    def users(self, block: int, start: int = 0) -> tuple[int, ...]:
        """Return the layers from `start` on that use a block, in order."""
        shared = block - len(self.layers)
        users = (block,) if shared < 0 else self.shared[shared].users
        return tuple(user for user in users if user >= start)

    def blocks_of(self, start: int, stop: int) -> list[int]:
        shared = [
            len(self.layers) + index
            for index, weight in enumerate(self.shared)
            if any(start <= user < stop for user in weight.users)
        ]
        return [*range(start, stop), *shared]

    def pieces(self, start: int, stop: int, resident: Collection[int] = ()) -> list[Piece]:
        """Return the ranges that layers `start` to `stop` need, with their places in a slot.

        Args:
            resident: Blocks that have places of their own and need none in the slot.
        """
        pieces: list[Piece] = []
        cursor = 0
        for block in self.blocks_of(start, stop):
            first, last = self.block_range(block)
            if block in resident or first == last:
                continue
            before = pieces[-1] if pieces else None
            if before is not None and before.stop_bytes == first and block < len(self.layers):
                pieces[-1] = before._replace(stop_bytes=last)
            else:
                pieces.append(Piece(first, last, cursor))
            cursor += last - first
        return pieces

    def segment_bytes(self, start: int, stop: int, resident: Collection[int] = ()) -> int:
        """Return the slot bytes that layers `start` to `stop` occupy."""
        blocks = self.blocks_of(start, stop)
        return sum(self.block_bytes(block) for block in blocks if block not in resident)


def _aligned_bytes(parameter: Tensor) -> int:
    unit = max(ALIGNMENT_BYTES, _ALIGNMENT_ELEMENTS * parameter.element_size())
    return -(-parameter.nbytes // unit) * unit


STAGING_BUFFERS = 2
"""One is filled while the other is spent."""


class HostGradients(NamedTuple):
    """The host's buffer of gradients."""

    starts: Mapping[int, int]
    """First byte of each block's gradients, by block; those that never come to the host have none.
    """
    total_bytes: int
    staging: Mapping[Layers, int]
    """Which staging buffer a segment of backward takes; empty if every block has its own place."""


def every_gradient(layout: Layout) -> HostGradients:
    """Return a place for every block, as the layout has them."""
    starts = {block: layout.gradient_range(block)[0] for block in range(layout.blocks)}
    return HostGradients(starts, layout.gradient_factor * layout.gradients.total_bytes, {})


def host_gradients(layout: Layout, shape: Shape, *, spends: bool) -> HostGradients:
    """Return where the gradients of a shape wait; `spends`: only until their own update."""
    if not spends:
        return every_gradient(layout)
    segments = list(reversed(list(itertools.pairwise(shape.backward_bounds))))
    passing = [_passing(layout, shape, layers) for layers in segments]
    buffer_bytes = max((_bytes(layout, blocks) for blocks in passing), default=0)
    starts: dict[int, int] = {}
    for number, blocks in enumerate(passing):
        at = number % STAGING_BUFFERS * buffer_bytes
        for block in blocks:
            starts[block] = at
            at += _bytes(layout, [block])
    at = min(STAGING_BUFFERS, len(segments)) * buffer_bytes
    for block in range(layout.blocks):
        if block not in starts and block not in shape.device_blocks:
            starts[block] = at
            at += _bytes(layout, [block])
    return HostGradients(
        starts, at, {layers: i % STAGING_BUFFERS for i, layers in enumerate(segments)}
    )


def _passing(layout: Layout, shape: Shape, layers: Layers) -> list[int]:
    """Return the blocks whose whole gradients leave after a segment, in the layout's order."""
    start, _ = layers
    return [
        block
        for block in layout.blocks_of(*layers)
        if block not in shape.device_blocks
        and layout.users(block)[0] >= start
        and (block in shape.resident_blocks or len(layout.users(block)) == 1)
    ]


def _bytes(layout: Layout, blocks: list[int]) -> int:
    ranges = (layout.gradient_range(block) for block in blocks)
    return sum(stop - start for start, stop in ranges)
