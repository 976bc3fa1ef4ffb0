"""What it takes to encode what travels: measured, so that no format is simulated as free.

`atom bench simulation` measures the figures again and prints them beside those that are used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_COPY_BYTES = 8
"""Read and written to copy a float32."""


class ActivationWire(NamedTuple):
    """How a pipeline's activations and their gradients travel."""

    name: str
    value_bytes: int
    row_bytes: int
    """Besides, for each vector of the model's width: its scale."""
    copies: float
    """Encoding and decoding a value takes as long as copying a float32 so many times. Measured on a
    processor; a GPU, whose element-wise kernels wait for memory likewise, is given the same."""

    def payload_bytes(self, values: int, rows: int) -> int:
        """Return the bytes of so many values in so many rows."""
        return self.value_bytes * values + self.row_bytes * rows

    def seconds(self, values: int, memory_bytes_per_s: float) -> float:
        """Return the seconds of encoding and decoding, once each, where memory has this rate."""
        return self.copies * _COPY_BYTES * values / memory_bytes_per_s


ACTIVATION_WIRES = (
    ActivationWire("bfloat16", 2, 0, 2.0),
    ActivationWire("int8", 1, 4, 5.5),
)
"""Both are tried, on every link."""
ELEMENTS_PER_S: Mapping[str, float] = {
    "float32": 1.5e9,
    "float16": 6e8,
    "int8": 3.3e8,
    "int4": 1.5e8,
    "topk": 4e7,
}
"""Elements of a fragment a second that a member of a round gets through on one core: it encodes its
contribution, decodes as much of others' and adds it up, and decodes the means."""
