"""Codecs: how the numbers of a piece travel. Adding one means adding a class and its name below.

A codec is deterministic: `decode` gives the same bits on every machine, because all members of a
round apply the decoded bytes, the owner of a slice included.
"""

from __future__ import annotations

from typing import Protocol

import torch

from atomtrain.errors import ConfigError, nearest
from atomtrain.swarm.slices import Span, piece_spans


def byte_view(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, not a copy."""
    return values.view(torch.uint8).numpy().data


class Codec(Protocol):
    """Turns 1-D float32 tensors into bytes and back."""

    name: str

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact number of bytes of an encoded piece."""
        ...

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return the bytes of `values`, which must be finite."""
        ...

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values of `data` to `out`; `data` has `encoded_bytes(len(out))` bytes."""
        ...


class Float32Codec:
    """The numbers as they are: 4 bytes each, no loss."""

    name = "float32"

    def encoded_bytes(self, elements: int) -> int:
        """Return four bytes per element."""
        return 4 * elements

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return a copy of the values' bytes."""
        return byte_view(values.clone())

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Copy the values."""
        if out.numel():
            out.copy_(torch.frombuffer(data, dtype=torch.float32))


class Float16Codec:
    """Half the bytes: float16 of the values divided by the piece's largest magnitude.

    The scale, a float32 before the values, keeps small changes out of float16's coarse subnormal
    range and large ones from overflowing; an element's error is at most 2**-11 of its magnitude,
    or 2**-25 of the piece's largest.
    """

    name = "float16"
    _SCALE_BYTES = 4

    def encoded_bytes(self, elements: int) -> int:
        """Return the scale's four bytes and two per element."""
        return self._SCALE_BYTES + 2 * elements

    def encode(self, values: torch.Tensor) -> memoryview:
        """Return scale and scaled values."""
        out = torch.empty(self.encoded_bytes(values.numel()), dtype=torch.uint8)
        scale = values.abs().amax() if values.numel() else torch.zeros(())
        out[: self._SCALE_BYTES].view(torch.float32).copy_(scale)
        body = out[self._SCALE_BYTES :].view(torch.float16)
        body.copy_(values / scale if scale > 0 else values)
        return byte_view(out)

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write value times scale."""
        raw = torch.frombuffer(data, dtype=torch.uint8)
        scale = raw[: self._SCALE_BYTES].view(torch.float32)
        out.copy_(raw[self._SCALE_BYTES :].view(torch.float16))
        out.mul_(scale)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float16Codec(), Float32Codec())}
CODEC_NAMES = tuple(_CODECS)


def codec_named(name: str) -> Codec:
    """Return the codec called `name`.

    Raises:
        ConfigError: there is no such codec.
    """
    if name not in _CODECS:
        raise ConfigError(
            f"wire format {name!r} does not exist; choose one of {', '.join(CODEC_NAMES)}."
            + nearest(name, CODEC_NAMES)
        )
    return _CODECS[name]


def encoded_bytes(codec: Codec, span: Span) -> int:
    """Return the bytes of a whole slice, sent piece by piece."""
    return sum(codec.encoded_bytes(piece.elements) for piece in piece_spans(span))


def encode_span(codec: Codec, values: torch.Tensor) -> list[memoryview]:
    """Return the encoded pieces of one slice's values."""
    return [codec.encode(values[a:b]) for a, b in piece_spans(Span(0, values.numel()))]


def decode_span(codec: Codec, pieces: list[memoryview], out: torch.Tensor) -> None:
    """Write the pieces made by `encode_span` to `out`."""
    spans = piece_spans(Span(0, out.numel()))
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        codec.decode(piece, out[start:stop])


def all_finite(values: torch.Tensor) -> bool:
    """Say whether no value is infinite or NaN; an overflowing sum counts as such."""
    return bool(torch.isfinite(values.sum()))
