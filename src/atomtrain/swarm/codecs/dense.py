"""Codecs that send every element: float32 exactly, float16 with one scale, blockwise integers.

Integers have 8 or 4 bits an element, and one float32 scale for each block of 256. Layout of a piece
of n elements: ceil(n / 256) scales, then n bytes, or ceil(n / 2) bytes with two elements each, the
earlier one in the low half. An element is `scale * q`: one product of exactly represented numbers,
so that every machine decodes the same bits.

Compiled kernels and PyTorch make the same bytes. Rounding to the nearest goes to even numbers where
two are as near. Rounding at random adds a number in [0, 1) to the quotient, both float32, and
rounds down; `uniform` says which number it is.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch

from atomtrain.native import library
from atomtrain.native.library import address
from atomtrain.swarm.codecs.lossy import (
    LEAST_SCALE,
    SCALE_BYTES,
    LossyCodec,
    Told,
    byte_view,
    check_scales,
    encoded,
)
from atomtrain.swarm.codecs.names import FLOAT16, FLOAT32

BLOCK_ELEMENTS = 256
_LOW_32_BITS = 0xFFFFFFFF


def uniform(elements: int, keys: tuple[int, int]) -> torch.Tensor:
    """Return a float32 in [0, 1) for each position: a hash of it and of two keys of 32 bits.

    All is modulo 2**32; 24 bits of the result count.
    """
    x = torch.arange(elements).add_(keys[0]).bitwise_and_(_LOW_32_BITS)
    x = ((x ^ x >> 16) * 0x7FEB352D) & _LOW_32_BITS
    x = (((x ^ x >> 15) + keys[1]) * 0x846CA68B) & _LOW_32_BITS
    return ((x ^ x >> 16) >> 8).float().mul_(2.0**-24)


def keys_of(seed: int) -> tuple[int, int]:
    """Return the keys of a seed: the first eight bytes of the hash of its digits."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


class Float32Codec:
    """The numbers as they are: 4 bytes each, no loss."""

    name = FLOAT32
    feedback = False
    exact = True

    def encoded_bytes(self, elements: int) -> int:
        """Return four bytes per element."""
        return 4 * elements

    def encode(
        self,
        values: torch.Tensor,
        sent: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> memoryview:
        """Return the values' bytes."""
        assert residual is None, "nothing is lost"
        if sent is not None:
            sent.copy_(values)
        return byte_view(values.contiguous())

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Copy the values."""
        if out.numel():
            out.copy_(encoded(data, 4 * out.numel()).view(torch.float32))

    def for_mean(self, contributors: int, seed: int) -> Float32Codec:
        """Return itself: means travel as contributions do."""
        return self

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros_like(decoded)


class Float16Codec(LossyCodec):
    """Half the bytes: float16 of the values divided by the piece's largest magnitude.

    The scale, a float32 before the values, keeps small changes out of float16's coarse subnormal
    range and large ones from overflowing; an element's error is at most 2**-11 of its magnitude,
    or 2**-25 of the piece's largest. That is too little to be worth a residual.
    """

    name = FLOAT16

    def encoded_bytes(self, elements: int) -> int:
        """Return the scale's four bytes and two per element."""
        return SCALE_BYTES + 2 * elements

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        scale = values.abs().amax() if values.numel() else torch.zeros(())
        out[:SCALE_BYTES].view(torch.float32).copy_(scale)
        body = out[SCALE_BYTES:].view(torch.float16)
        body.copy_(values / scale if scale > 0 else values)

    def _encode_compiled(
        self,
        core: ctypes.CDLL,
        values: torch.Tensor,
        out: torch.Tensor,
        told: Told,
    ) -> None:
        count = ctypes.c_int64(values.numel())
        core.atom_half_encode(address(values), count, address(out), address(told.sent))

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write value times scale."""
        raw, core = encoded(data, self.encoded_bytes(out.numel())), library.core()
        scale = check_scales(raw[:SCALE_BYTES].view(torch.float32))
        if core is not None:
            core.atom_half_decode(address(raw), ctypes.c_int64(out.numel()), address(out))
            return
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


class BlockCodec(LossyCodec):
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
        self._bits = bits
        self._most = (1 << (bits - 1)) - 1
        self._keys = None if seed is None else keys_of(seed)

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of the scales and of the integers."""
        return SCALE_BYTES * _blocks(elements) + (elements * self._bits + 7) // 8

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        elements = values.numel()
        rows = _padded(values, BLOCK_ELEMENTS).view(-1, BLOCK_ELEMENTS)
        scales = rows.abs().amax(dim=1) / self._most if elements else torch.empty(0)
        scales[scales < LEAST_SCALE] = 0.0
        body = _blocks(elements) * SCALE_BYTES
        out[:body].view(torch.float32).copy_(scales)
        units = rows / torch.where(scales > 0, scales, torch.inf).unsqueeze(1)
        if self._keys is None:
            units.round_()
        else:
            units.add_(uniform(rows.numel(), self._keys).view_as(units)).floor_()
        whole = units.clamp_(-self._most, self._most).view(-1)[:elements].to(torch.int8)
        out[body:].copy_(whole.view(torch.uint8) if self._bits == 8 else _pack_halves(whole))

    def _encode_compiled(
        self,
        core: ctypes.CDLL,
        values: torch.Tensor,
        out: torch.Tensor,
        told: Told,
    ) -> None:
        keys = None if self._keys is None else (ctypes.c_uint32 * 2)(*self._keys)
        sizes = ctypes.c_int64(values.numel()), ctypes.c_int64(self._bits)
        where = address(out), address(told.sent), address(told.residual)
        core.atom_blocks_encode(address(values), *sizes, keys, *where)

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write integer times scale.

        Raises:
            BadMessage: a scale that `encode` does not make.
        """
        elements, core = out.numel(), library.core()
        if not elements:
            return
        raw = encoded(data, self.encoded_bytes(elements))
        body = _blocks(elements) * SCALE_BYTES
        scales = check_scales(raw[:body].view(torch.float32))
        if core is not None:
            sizes = ctypes.c_int64(elements), ctypes.c_int64(self._bits)
            core.atom_blocks_decode(address(raw), *sizes, address(out))
            return
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
        units = rows.amax(dim=1, keepdim=True) / (self._most - 1) + LEAST_SCALE
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
