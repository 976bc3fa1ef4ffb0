"""Codecs that keep every number: float32 exactly, float16 with one scale for a piece."""

from __future__ import annotations

import torch

from atomtrain.swarm.codecs.names import FLOAT16, FLOAT32
from atomtrain.swarm.transport.messages import BadMessage

SCALE_BYTES = 4
"""Bytes of a float32 scale."""


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
