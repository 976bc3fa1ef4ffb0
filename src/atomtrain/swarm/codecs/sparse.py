"""Sparse codecs: the largest changes of each block of 4096, and means that are zero elsewhere.

A contribution names for each block its 1/32 largest elements: two float32 magnitudes, a position
of 12 bits and a value of 2 bits (sign, and which magnitude) each: 0.453 bits an element. A mean of
K such contributions is zero but for K/32 of its elements: one bit an element says where, then come
the non-zero ones with 8 bits each.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from atomtrain.errors import BadMessage
from atomtrain.native import library
from atomtrain.native.library import address
from atomtrain.swarm.codecs.dense import BlockCodec
from atomtrain.swarm.codecs.lossy import (
    LEAST_SCALE,
    SCALE_BYTES,
    LossyCodec,
    Told,
    check_scales,
    encoded,
)
from atomtrain.swarm.codecs.names import TOPK

BLOCK_ELEMENTS = 4096
ONE_IN = 32
"""One element in so many is sent."""


def kept(elements: int) -> int:
    """Return how many elements of a piece a contribution names."""
    return sum(rows * -(-width // ONE_IN) for _, rows, width in _groups(elements))


class _Layout(NamedTuple):
    """Offsets within an encoded group of equal blocks, in bytes."""

    start: int
    positions: int
    values: int
    stop: int


class TopKCodec(LossyCodec):
    """The largest elements of each block; what is not sent is left to error feedback.

    None of the four values is zero: where a block has fewer changes than are sent, a few elements
    that did not change get the smaller magnitude, and the next contribution takes it back.
    """

    name = TOPK
    feedback = True

    def encoded_bytes(self, elements: int) -> int:
        """Return 232 bytes for each block of 4096, and those of the rest."""
        stop = 0
        for _, rows, width in _groups(elements):
            stop = _layout(stop, rows, width).stop
        return stop

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        stop = 0
        for start, rows, width in _groups(values.numel()):
            layout = _layout(stop, rows, width)
            blocks = values[start : start + rows * width].view(rows, width)
            magnitudes, positions, codes = _largest(blocks, -(-width // ONE_IN))
            scales = out[layout.start : layout.positions].view(torch.float32)
            scales.copy_(magnitudes.view(-1))
            out[layout.positions : layout.values] = _pack_12_bits(positions).view(-1)
            out[layout.values : layout.stop] = _pack_2_bits(codes).view(-1)
            stop = layout.stop

    def _encode_compiled(
        self,
        core: ctypes.CDLL,
        values: torch.Tensor,
        out: torch.Tensor,
        told: Told,
    ) -> None:
        stop = 0
        for start, rows, width in _groups(values.numel()):
            layout = _layout(stop, rows, width)
            sizes = ctypes.c_int64(rows), ctypes.c_int64(width)
            parts = (address(out[at:]) for at in layout[:3])
            to = (address(None if each is None else each[start:]) for each in told)
            core.atom_largest_encode(address(values[start:]), *sizes, *parts, *to)
            stop = layout.stop

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the elements that were sent, and zeros.

        Raises:
            BadMessage: magnitudes or positions that `encode` does not make.
        """
        if not out.numel():
            return
        raw = encoded(data, self.encoded_bytes(out.numel()))
        stop, core = 0, library.core()
        for start, rows, width in _groups(out.numel()):
            layout = _layout(stop, rows, width)
            check_scales(raw[layout.start : layout.positions].view(torch.float32))
            blocks = out[start : start + rows * width].view(rows, width)
            if core is None:
                rising = _decode(raw, layout, blocks)
            else:
                sizes = ctypes.c_int64(rows), ctypes.c_int64(width)
                parts = (address(raw[at:]) for at in layout[:3])
                rising = not core.atom_largest_decode(*parts, *sizes, address(blocks))
            if not rising:
                raise BadMessage("positions that do not rise, or lie outside their block")
            stop = layout.stop

    def for_mean(self, contributors: int, seed: int) -> BlockCodec | SparseMeanCodec:
        """Return the smaller of a sparse and a dense format; random rounding in both."""
        dense, sparse = BlockCodec(8, seed=seed), SparseMeanCodec(contributors, seed)
        smaller = sparse.encoded_bytes(BLOCK_ELEMENTS) < dense.encoded_bytes(BLOCK_ELEMENTS)
        return sparse if smaller else dense

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return no limit: what is not sent may be as large as what is."""
        return torch.full_like(decoded, torch.inf)


class SparseMeanCodec(LossyCodec):
    """A bit for each element, then 8-bit integers for those that are not zero.

    Has room for all that `contributors` contributions of `TopKCodec` can name.
    """

    name = "sparse-mean"

    def __init__(self, contributors: int, seed: int) -> None:
        """`seed` is that of the random rounding."""
        self._contributors = contributors
        self._values = BlockCodec(8, seed=seed)

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of the bits, in units of four, and of the values."""
        return _bit_bytes(elements) + self._values.encoded_bytes(self._room(elements))

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        there, bits = values != 0, _bit_bytes(values.numel())
        room = torch.zeros(self._room(values.numel()))
        found = values[there]
        assert found.numel() <= room.numel(), "more values than the contributions can name"
        room[: found.numel()] = found
        packed = np.packbits(there.numpy(), bitorder="little")
        out[:bits].zero_()[: packed.size] = torch.from_numpy(packed)
        self._values.encode_into(out[bits:], room)

    def _encode_compiled(
        self,
        core: ctypes.CDLL,
        values: torch.Tensor,
        out: torch.Tensor,
        told: Told,
    ) -> None:
        elements, bits = ctypes.c_int64(values.numel()), _bit_bytes(values.numel())
        room = torch.zeros(self._room(values.numel()))
        there, most = address(out), ctypes.c_int64(room.numel())
        found = core.atom_sparse_gather(address(values), elements, there, address(room), most)
        assert found <= room.numel(), "more values than the contributions can name"
        self._values.encode_into(out[bits:], room, Told(sent=room))
        if told.sent is not None:
            core.atom_sparse_scatter(there, elements, address(room), most, address(told.sent))

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values where they belong, and zeros.

        Raises:
            BadMessage: more values than there is room for, or scales that are not finite.
        """
        elements = out.numel()
        if not elements:
            return
        raw, bits = encoded(data, self.encoded_bytes(elements)), _bit_bytes(elements)
        room = torch.empty(self._room(elements))
        self._values.decode(memoryview(data)[bits:], room)
        if not _scatter(raw[:bits], room, out):
            raise BadMessage(f"a sparse mean of more values than {room.numel()}, or beyond its end")

    def for_mean(self, contributors: int, seed: int) -> SparseMeanCodec:
        """Return the format for a mean of so many."""
        return SparseMeanCodec(contributors, seed)

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return a unit of the largest element's block: which others are in one is not known."""
        largest = decoded.abs().amax() if decoded.numel() else torch.zeros(())
        return torch.full_like(decoded, float(largest) / 126 + 2.0**-126)

    def _room(self, elements: int) -> int:
        return min(elements, self._contributors * kept(elements))


def _groups(elements: int) -> list[tuple[int, int, int]]:
    """Return the start, number and width of the full blocks, and of the rest, where there are."""
    rows, rest = divmod(elements, BLOCK_ELEMENTS)
    groups = [(0, rows, BLOCK_ELEMENTS), (rows * BLOCK_ELEMENTS, 1, rest)]
    return [(start, count, width) for start, count, width in groups if count and width]


def _layout(start: int, rows: int, width: int) -> _Layout:
    count = -(-width // ONE_IN)
    positions = start + rows * 2 * SCALE_BYTES
    values = positions + rows * 3 * -(-count // 2)
    return _Layout(start, positions, values, values + rows * -(-count // 4))


def _largest(blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two magnitudes for each block, and of its largest the positions, rising, and codes."""
    sizes = blocks.abs().view(torch.int32).to(torch.int64)  # in the order of the magnitudes
    width = blocks.shape[1]
    ranks = sizes * BLOCK_ELEMENTS + torch.arange(width - 1, -1, -1)  # no two are equal
    positions = torch.topk(ranks, count, dim=1, sorted=False).indices.sort(dim=1).values
    values = blocks.gather(1, positions)
    wide = values.abs().double()
    large = wide > _sum_in_order(wide) / count
    low = _sum_in_order(wide * ~large) / (~large).sum(dim=1, keepdim=True).clamp_min(1)
    high = _sum_in_order(wide * large) / large.sum(dim=1, keepdim=True).clamp_min(1)
    levels = torch.cat((low, high), dim=1).float()
    levels[levels < LEAST_SCALE] = 0.0  # as in BlockCodec
    return levels, positions, large.to(torch.uint8) + 2 * (values < 0).to(torch.uint8)


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(rows[:, :1])
    for column in rows.split(1, dim=1):
        total += column
    return total


def _decode(raw: torch.Tensor, layout: _Layout, blocks: torch.Tensor) -> bool:
    """Write a group's elements that were sent, and zeros; say whether positions are right."""
    rows, width = blocks.shape
    count = -(-width // ONE_IN)
    scales = raw[layout.start : layout.positions].view(torch.float32).view(rows, 2)
    positions = _unpack_12_bits(raw[layout.positions : layout.values].view(rows, -1), count)
    codes = _unpack_2_bits(raw[layout.values : layout.stop].view(rows, -1), count)
    if int(positions[:, -1].max()) >= width or not bool((positions.diff(dim=1) > 0).all()):
        return False
    levels = torch.cat((scales, -scales), dim=1)
    blocks.zero_().scatter_(1, positions, levels.gather(1, codes))
    return True


def _pack_12_bits(positions: torch.Tensor) -> torch.Tensor:
    pairs = torch.nn.functional.pad(positions, (0, positions.shape[1] % 2))
    first, second = pairs[:, 0::2], pairs[:, 1::2]
    three = torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), dim=2)
    return three.to(torch.uint8).flatten(1)


def _unpack_12_bits(raw: torch.Tensor, count: int) -> torch.Tensor:
    three = raw.view(raw.shape[0], -1, 3).to(torch.int64)
    first = three[:, :, 0] | (three[:, :, 1] & 15) << 8
    second = three[:, :, 1] >> 4 | three[:, :, 2] << 4
    return torch.stack((first, second), dim=2).flatten(1)[:, :count]


def _pack_2_bits(codes: torch.Tensor) -> torch.Tensor:
    four = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(codes.shape[0], -1, 4)
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def _unpack_2_bits(raw: torch.Tensor, count: int) -> torch.Tensor:
    four = torch.stack([raw >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    return four.flatten(1)[:, :count].to(torch.int64)


def _scatter(raw: torch.Tensor, room: torch.Tensor, out: torch.Tensor) -> bool:
    """Write the values of `room` where bits say, and zeros; say whether the bits are right."""
    elements, core = out.numel(), library.core()
    if core is not None:
        sizes = ctypes.c_int64(elements), ctypes.c_int64(room.numel())
        return not core.atom_sparse_scatter(
            address(raw), sizes[0], address(room), sizes[1], address(out)
        )
    named = torch.from_numpy(np.unpackbits(raw.numpy(), bitorder="little")).bool()
    count = int(named.sum())
    if count > room.numel() or bool(named[elements:].any()):
        return False
    out.zero_()
    out[named[:elements]] = room[:count]
    return True


def _bit_bytes(elements: int) -> int:
    return 4 * -(-elements // 32)  # scales follow, which lie at multiples of four
