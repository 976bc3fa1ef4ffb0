"""What codecs that lose something share: the two ways to encode, bytes, and scales.

Each is written twice: compiled (`native/kernels/codecs.c`), and in PyTorch, which is the reference
and does where nothing compiled can be had. Both make the same bytes, refuse the same bytes and
decode to the same bits, down to the order of sums and the choice among equal numbers; the modules
of the codecs say which.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from atomtrain.errors import BadMessage
from atomtrain.native import library

SCALE_BYTES = 4
"""Bytes of a float32 scale."""
LEAST_SCALE = 2.0**-126
"""The smallest normal float32: below it, processors that flush subnormals would disagree."""


class Told(NamedTuple):
    """What encoding writes beside the bytes, where somebody wants it; see `Codec.encode`."""

    sent: torch.Tensor | None = None
    """What the bytes decode to; may be the values."""
    residual: torch.Tensor | None = None
    """What of the values they lose; may not be the values."""


class LossyCodec(ABC):
    """Encodes on whichever path there is; each codec says how."""

    feedback = False
    exact = False

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Return the exact number of bytes of an encoded piece."""

    @abstractmethod
    def decode(self, data: bytearray | memoryview, out: torch.Tensor) -> None:
        """Write the values of `data` to `out`."""

    def encode(
        self,
        values: torch.Tensor,
        sent: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> memoryview:
        """Return the bytes of finite `values`; see `Codec`."""
        out = torch.empty(self.encoded_bytes(values.numel()), dtype=torch.uint8)
        self.encode_into(out, values.contiguous(), Told(sent, residual))
        return byte_view(out)

    def encode_into(
        self,
        out: torch.Tensor,
        values: torch.Tensor,
        told: Told = Told(),  # noqa: B008  it never changes
    ) -> None:
        """Write the bytes of contiguous `values` to `out`, 1-D uint8 of their number."""
        assert told.residual is None or self.feedback, "nobody carries on what this codec loses"
        core = library.core()
        if core is not None:
            self._encode_compiled(core, values, out, told)
            return
        self._encode(values, out)
        if not values.numel() or not any(each is not None for each in told):
            return
        decoded = torch.empty_like(values)
        self.decode(byte_view(out), decoded)
        if told.residual is not None:
            torch.sub(values, decoded, out=told.residual)
        if told.sent is not None:
            told.sent.copy_(decoded)

    @abstractmethod
    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write the bytes of `values` to `out` with PyTorch."""

    @abstractmethod
    def _encode_compiled(
        self,
        core: ctypes.CDLL,
        values: torch.Tensor,
        out: torch.Tensor,
        told: Told,
    ) -> None:
        """Write the bytes of `values` to `out`, and the rest of what `encode` writes."""


def byte_view(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, not a copy."""
    return values.view(torch.uint8).numpy().data


def encoded(data: bytearray | memoryview, size_bytes: int) -> torch.Tensor:
    """Return bytes to be decoded as a 1-D uint8 tensor, not a copy.

    Raises:
        BadMessage: they are not as many as they must be, which is at least one.
    """
    if len(data) != size_bytes:
        raise BadMessage(f"an encoded piece of {len(data)} bytes; it must have {size_bytes}")
    return torch.frombuffer(data, dtype=torch.uint8)


def check_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales that came off the wire.

    Raises:
        BadMessage: one is infinite, NaN, negative, or so large that values would overflow.
    """
    if not bool(((scales >= 0) & (scales <= 1e36)).all()):
        raise BadMessage("a scale that is not finite, negative, or above 1e36")
    return scales
