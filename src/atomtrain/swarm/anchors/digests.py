"""Hashes of large tensors, which name anchors and show that members hold the same bytes.

BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), cut to 128 bits, hashes several blocks at
once in the processor's wide registers, which matters where each peer hashes a fragment twice in a
round.
"""

from __future__ import annotations

import hashlib
from typing import Any

HASH = "blake3"
OLD_HASH = "sha256"
"""What checkpoints name that do not say which."""
_DIGITS = 32


class Digest:
    """A hash of bytes, given one after the other."""

    def __init__(self, name: str = HASH) -> None:
        """Begin with no bytes; `name` is one of the two above."""
        from blake3 import blake3

        self._hash: Any = blake3() if name == HASH else hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes; releases the interpreter lock while it works."""
        self._hash.update(data)

    def text(self) -> str:
        """Return the hash of all bytes so far, 32 hexadecimal digits."""
        return str(self._hash.hexdigest())[:_DIGITS]
