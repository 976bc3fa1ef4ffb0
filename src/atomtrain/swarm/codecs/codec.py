"""Codecs: how the numbers of a piece travel. Adding one means a class, its name in `names`.

A codec is deterministic: `decode` gives the same bits on every machine, because all members of a
round apply the decoded bytes, the owner of a slice included.

| name | contribution, bits an element | mean, bits an element | residual |
|---|---|---|---|
| `float32` | 32 | 32 | no |
| `float16` | 16 | 16 | no |
| `int8` | 8.125 | 8.125 | yes |
| `int4` | 4.125 | 8.125 | yes |
| `topk` | 0.453 | 1 + 0.254 for each contributor, at most 8.125 | yes |

Where there is a residual, a peer keeps what encoding lost of its contribution and adds it to its
next one (error feedback; Seide et al. 2014, Stich et al. 2018). A mean's error nobody could carry
on, since its owner may own another slice, or nothing, in the next round: means are rounded at
random instead, so that the error is zero on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from atomtrain.swarm.codecs.dense import BlockCodec, Float16Codec, Float32Codec
from atomtrain.swarm.codecs.lossy import byte_view
from atomtrain.swarm.codecs.names import check_codec_name
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.codecs.sparse import TopKCodec


class Codec(Protocol):
    """Turns 1-D float32 tensors into bytes and back."""

    name: str
    feedback: bool
    """Whether what encoding loses is worth a residual."""
    exact: bool
    """Whether the bytes are those of the values: then neither way needs a copy."""

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact number of bytes of an encoded piece."""
        ...

    def encode(
        self,
        values: torch.Tensor,
        sent: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> memoryview:
        """Return the bytes of `values`, which must be finite and not change from now on.

        What they decode to is written to `sent`, which may be `values`, and what encoding loses to
        `residual`, which may not: 1-D contiguous float32. Only codecs with feedback take that.
        """
        ...

    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values of `data` to `out`; `data` has `encoded_bytes(len(out))` bytes.

        Raises:
            BadMessage: `encode` cannot have made it; `out` is undefined.
        """
        ...

    def for_mean(self, contributors: int, seed: int) -> Codec:
        """Return the codec of a mean of so many contributions.

        `seed` is that of random rounding, for the owner that encodes; it does not change the size,
        nor how the bytes are decoded.
        """
        ...

    def error(self, decoded: torch.Tensor) -> torch.Tensor:
        """Return by how much each element of a slice may differ, at most, from what was encoded."""
        ...


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Float16Codec(), Float32Codec(), BlockCodec(8), BlockCodec(4), TopKCodec())
}


def codec_named(name: str) -> Codec:
    """Return the codec called `name`.

    Raises:
        ConfigError: there is no such codec.
    """
    check_codec_name("", name)
    return _CODECS[name]


def base_codec(codec: Codec) -> Codec:
    """Return how bases travel in a run whose changes travel with `codec`."""
    return codec_named("float32" if codec.exact else "float16")


def encoded_bytes(codec: Codec, span: Span) -> int:
    """Return the bytes of a whole slice, sent piece by piece."""
    return sum(codec.encoded_bytes(piece.elements) for piece in piece_spans(span))


def encode_span(
    codec: Codec, values: torch.Tensor, sent: torch.Tensor | None = None
) -> list[memoryview]:
    """Return the encoded pieces of one slice's values; write what they decode to to `sent`."""
    spans = piece_spans(Span(0, values.numel()))
    return [codec.encode(values[a:b], None if sent is None else sent[a:b]) for a, b in spans]


def decoded(codec: Codec, pieces: Sequence[memoryview], elements: int) -> torch.Tensor:
    """Return a slice's values; they may share the memory of `pieces`, which is the caller's.

    Raises:
        BadMessage: `encode_span` cannot have made it.
    """
    if codec.exact and len(pieces) == 1:
        return torch.frombuffer(pieces[0], dtype=torch.float32)
    out = torch.empty(elements)
    decode_span(codec, pieces, out)
    return out


def decode_span(codec: Codec, pieces: Sequence[memoryview], out: torch.Tensor) -> None:
    """Write the pieces made by `encode_span` to `out`."""
    spans = piece_spans(Span(0, out.numel()))
    for piece, (start, stop) in zip(pieces, spans, strict=True):
        codec.decode(piece, out[start:stop])


def square_of(values: torch.Tensor) -> float | None:
    """Return the sum of squares of 1-D float32 values; None if it or one of them is not finite."""
    square = float(torch.dot(values, values))
    return square if math.isfinite(square) else None


def all_finite(values: torch.Tensor) -> bool:
    """Say whether no value is infinite or NaN; an overflowing sum of squares counts as such."""
    return square_of(values) is not None


__all__ = [
    "Codec",
    "all_finite",
    "byte_view",
    "codec_named",
    "decode_span",
    "decoded",
    "encode_span",
    "encoded_bytes",
    "square_of",
]
