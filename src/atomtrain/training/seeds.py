"""Where the random numbers of a peer come from."""

from __future__ import annotations

import hashlib


def seed_of(run_seed: int, peer: str, what: object) -> int:
    """Return the seed of what one peer draws, such as a step's dropout: a pure function of all."""
    key = f"{run_seed}/{peer}/{what}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
