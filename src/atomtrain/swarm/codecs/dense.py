"""Codecs that send every element: float32 exactly, float16 with one scale, blockwise integers.

Integers have 8 or 4 bits an element, and one float32 scale for each block of 256. Layout of a piece
of n elements: ceil(n / 256) scales, then n bytes, or ceil(n / 2) bytes with two elements each, the
earlier one in the low half. An element is `scale * q`: one product of exactly represented numbers,
so that every machine decodes the same bits.
"""

from __future__ import annotations

import torch

from atomtrain.swarm.codecs.names import FLOAT16, FLOAT32
from atomtrain.swarm.transport.messages import BadMessage

SCALE_BYTES = 4
"""Bytes of a float32 scale."""
BLOCK_ELEMENTS = 256
_LEAST_SCALE = 2.0**-126
"""The smallest normal float32: below it, processors that flush subnormals would disagree."""


def byte_view(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, not a copy."""
    return values.view(torch.uint8).numpy().data


def check_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales that came off the wire.

    Raises:
        BadMessage: one is infinite, NaN, negative, or so large that values would overflow.
    """
    if not bool(((scales >= 0) & (scales <= 1e36)).all()):
        raise BadMessage("a scale that is not finite, negative, or above 1e36")
    return scales


class Float32Codec:
    """The numbers as they are: 4 bytes each, no loss."""

    name = FLOAT32
    feedback = False
    exact = True

    def encoded_bytes(self, elements: int) -> int:
        """Return four bytes per element."""
        return 4 * elements

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return the values' bytes."""
        return byte_view(values.contiguous())

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Copy the values."""
        if out.numel():
            out.copy_(torch.frombuffer(data, dtype=torch.float32))

    def for_mean(self, contributors: int, seed: int) -> Float32Codec:
        """Return itself: means travel as contributions do."""
        return self

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros_like(decoded)


class Float16Codec:
    """Half the bytes: float16 of the values divided by the piece's largest magnitude.

    The scale, a float32 before the values, keeps small changes out of float16's coarse subnormal
    range and large ones from overflowing; an element's error is at most 2**-11 of its magnitude,
    or 2**-25 of the piece's largest. That is too little to be worth a residual.
    """

    name = FLOAT16
    feedback = False
    exact = False

    def encoded_bytes(self, elements: int) -> int:
        """Return the scale's four bytes and two per element."""
        return SCALE_BYTES + 2 * elements

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return scale and scaled values."""
        out = torch.empty(self.encoded_bytes(values.numel()), dtype=torch.uint8)
        scale = values.abs().amax() if values.numel() else torch.zeros(())
        out[:SCALE_BYTES].view(torch.float32).copy_(scale)
        body = out[SCALE_BYTES:].view(torch.float16)
        body.copy_(values / scale if scale > 0 else values)
        return byte_view(out)

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write value times scale."""
        raw = torch.frombuffer(data, dtype=torch.uint8)
        scale = check_scales(raw[:SCALE_BYTES].view(torch.float32))
        out.copy_(raw[SCALE_BYTES:].view(torch.float16))
        out.mul_(scale)

    def for_mean(self, contributors: int, seed: int) -> Float16Codec:
        """Return itself: means travel as contributions do."""
        return self

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return the rounding of the numbers, and of the smallest beside the largest."""
        size = decoded.abs()
        largest = size.amax() if size.numel() else torch.zeros(())
        return size.mul_(2.0**-10).add_(largest * 2.0**-23)


class BlockCodec:
    """Signed integers of 8 or 4 bits: 8.125 or 4.125 bits an element.

    Rounds to the nearest, or, given a seed, up or down at random with an expectation that is
    exact: for means, whose error nobody carries on. An element's error is at most half a unit, or
    one with random rounding; a unit is 1/127 or 1/7 of its block's largest magnitude.
    """

    def __init__(self, bits: int, *, seed: int | None = None) -> None:
        """`bits` is 8 or 4; a `seed` makes rounding random."""
        assert bits in (4, 8), bits
        self.name = f"int{bits}"
        self.feedback = seed is None
        self.exact = False
        self._bits = bits
        self._most = (1 << (bits - 1)) - 1
        self._random = None if seed is None else torch.Generator().manual_seed(seed)

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of the scales and of the integers."""
        return SCALE_BYTES * _blocks(elements) + (elements * self._bits + 7) // 8

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return scales and integers of finite `values`."""
        elements = values.numel()
        out = torch.empty(self.encoded_bytes(elements), dtype=torch.uint8)
        rows = _padded(values, BLOCK_ELEMENTS).view(-1, BLOCK_ELEMENTS)
        scales = rows.abs().amax(dim=1) / self._most if elements else torch.empty(0)
        scales[scales < _LEAST_SCALE] = 0.0
        body = _blocks(elements) * SCALE_BYTES
        out[:body].view(torch.float32).copy_(scales)
        units = rows / torch.where(scales > 0, scales, torch.inf).unsqueeze(1)
        if self._random is None:
            units.round_()
        else:
            units.add_(torch.rand(units.shape, generator=self._random)).floor_()
        whole = units.clamp_(-self._most, self._most).view(-1)[:elements].to(torch.int8)
        out[body:].copy_(whole.view(torch.uint8) if self._bits == 8 else _pack_halves(whole))
        return byte_view(out)

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write integer times scale.

        Raises:
            BadMessage: a scale that `encode` does not make.
        """
        elements = out.numel()
        if not elements:
            return
        raw = torch.frombuffer(data, dtype=torch.uint8)
        body = _blocks(elements) * SCALE_BYTES
        scales = check_scales(raw[:body].view(torch.float32))
        whole = raw[body:]
        out.copy_(whole.view(torch.int8) if self._bits == 8 else _unpack_halves(whole)[:elements])
        full = elements - elements % BLOCK_ELEMENTS
        out[:full].view(-1, BLOCK_ELEMENTS).mul_(scales[: full // BLOCK_ELEMENTS].unsqueeze(1))
        out[full:].mul_(scales[-1])

    def for_mean(self, contributors: int, seed: int) -> BlockCodec:
        """Return 8 bits with random rounding."""
        return BlockCodec(8, seed=seed)

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return a unit of each element's block, whose largest is as many units as there are."""
        rows = _padded(decoded.abs(), BLOCK_ELEMENTS).view(-1, BLOCK_ELEMENTS)
        units = rows.amax(dim=1, keepdim=True) / (self._most - 1) + _LEAST_SCALE
        return units.expand_as(rows).reshape(-1)[: decoded.numel()]


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def _padded(values: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % multiple))


def _pack_halves(whole: torch.Tensor) -> torch.Tensor:
    pairs = (_padded(whole, 2) + 8).view(torch.uint8).view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def _unpack_halves(raw: torch.Tensor) -> torch.Tensor:
    return torch.stack((raw & 15, raw >> 4), dim=1).view(-1).to(torch.int8) - 8
