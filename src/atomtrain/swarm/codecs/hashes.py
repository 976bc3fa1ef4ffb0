"""Hashes of many short pieces: BLAKE3, cut to 128 bits.

Compiled (`native/kernels/hashes.c`) they are made several at once; the library, which is the
reference, does it where nothing compiled can be had, and whatever is left over.
"""

from __future__ import annotations

import ctypes

import torch

from atomtrain.native import library
from atomtrain.native.library import address
from atomtrain.swarm.codecs.lossy import byte_view

HASH_BYTES = 16
_BLOCK_BYTES, _PIECE_BYTES_MAX = 64, 1 << 17


def hash_of(data: bytes | memoryview) -> bytes:
    """Return the hash of some bytes."""
    from blake3 import blake3

    return bytes(blake3(data).digest(length=HASH_BYTES))


def piece_hashes(values: torch.Tensor, elements: int) -> bytes:
    """Return the hashes of so many elements each, one behind the other; the last may be fewer.

    `values`: 1-D contiguous float32. Pieces have at most 32768 elements, a power of two.
    """
    data, step, core = byte_view(values), 4 * elements, library.core()
    whole = len(data) // step if core is not None and step % _BLOCK_BYTES == 0 else 0
    assert step <= _PIECE_BYTES_MAX, elements
    assert step & (step - 1) == 0, elements
    made = ctypes.create_string_buffer(HASH_BYTES * whole)
    if whole and core is not None:
        sizes = ctypes.c_int64(whole), ctypes.c_int64(step)
        core.atom_piece_hashes(address(values), *sizes, made)
    rest = range(whole * step, len(data), step)
    return made.raw + b"".join(hash_of(data[start : start + step]) for start in rest)


def pair_hashes(below: bytes) -> bytes:
    """Return the hash of each two of an even number of hashes, marked as such by a byte before."""
    core, pairs = library.core(), len(below) // (2 * HASH_BYTES)
    if core is None:
        step = 2 * HASH_BYTES
        return b"".join(pair_hash(below[at : at + step]) for at in range(0, len(below), step))
    made = ctypes.create_string_buffer(HASH_BYTES * pairs)
    core.atom_pair_hashes(ctypes.c_char_p(below), ctypes.c_int64(pairs), made)
    return made.raw


def pair_hash(pair: bytes) -> bytes:
    """Return the hash of two hashes.

    It is of a length that no piece has, which are multiples of four bytes: so it cannot be passed
    off as one.
    """
    return hash_of(b"n" + pair)
