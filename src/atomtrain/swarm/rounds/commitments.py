"""Commitments: what a member signs of its contribution to a slice, so that parts can be shown.

The numbers that a contribution decodes to are cut into chunks. Their hashes are the leaves of a
binary tree of hashes (Merkle 1987). The member signs its root, and the contribution's norm. Who has
the root can be shown any chunk, with the hashes beside its way up, and knows that nobody has
changed it since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from atomtrain.swarm.codecs.codec import byte_view, square_of
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.transport.messages import Begin, Mean, encode

_HASH_BYTES = 16
_LEAST_ELEMENTS, _MOST_ELEMENTS = 64, 1 << 12
"""Of a chunk; both powers of two, so that pieces end where chunks do."""
_CHUNKS = 512
"""Of a slice, about: so a chunk of each contribution is little beside what an exchange moves, and
chunks of large slices are large enough to be hashed quickly."""


def chunk_elements(elements: int) -> int:
    """Return the size of the chunks of a slice of so many elements."""
    wanted = max(1, elements // _CHUNKS)
    return min(max(_LEAST_ELEMENTS, 1 << (wanted.bit_length() - 1)), _MOST_ELEMENTS)


def chunk_spans(elements: int) -> tuple[Span, ...]:
    """Return where the chunks of a slice are; the last one may be smaller."""
    return piece_spans(Span(0, elements), chunk_elements(elements))


def leaves_of(values: torch.Tensor, slice_elements: int) -> list[bytes]:
    """Return the hashes of the chunks of a piece of a slice, 1-D float32.

    Pieces begin where chunks do.
    """
    data, step = byte_view(values.contiguous()), 4 * chunk_elements(slice_elements)
    return [_leaf(data[start : start + step]) for start in range(0, len(data), step)]


class Tree:
    """A tree of hashes over the chunks of one contribution."""

    def __init__(self, leaves: Iterable[bytes]) -> None:
        """Build it over these hashes; no leaves are as good as one of nothing."""
        self._levels = [list(leaves) or [_leaf(memoryview(b""))]]
        while len(below := self._levels[-1]) > 1:
            pairs = zip(below[::2], below[1::2], strict=False)
            odd = below[len(below) & ~1 :]  # has nothing beside it, and goes up as it is
            self._levels.append([_node(left, right) for left, right in pairs] + odd)

    @property
    def root(self) -> str:
        """The hash of everything, in hexadecimal digits."""
        return self._levels[-1][0].hex()

    def path(self, chunk: int) -> str:
        """Return the hashes beside the way from a chunk to the root, in hexadecimal digits."""
        beside = []
        for level in self._levels[:-1]:
            if chunk ^ 1 < len(level):
                beside.append(level[chunk ^ 1])
            chunk >>= 1
        return b"".join(beside).hex()


class Commitment(NamedTuple):
    """What a member is bound to."""

    root: str
    norm: float

    @property
    def text(self) -> str:
        """How it travels, and is signed."""
        return f"{self.root} {self.norm!r}"

    @classmethod
    def read(cls, text: str) -> Commitment | None:
        """Return what `text` has made; None if it is nothing of the kind."""
        root, _, norm = text.partition(" ")
        try:
            found = cls(root, float(norm))
        except ValueError:
            return None
        return found if math.isfinite(found.norm) and found.text == text else None


class Own(NamedTuple):
    """A member's contribution to a slice of its own, and what it is bound to by it."""

    values: torch.Tensor
    tree: Tree
    commitment: Commitment


def committed(values: torch.Tensor) -> Own:
    """Return a whole contribution, 1-D float32, with its tree and commitment."""
    tree = Tree(leaves_of(values, values.numel()))
    return Own(values, tree, Commitment(tree.root, (square_of(values) or 0.0) ** 0.5))


def leads_to(root: str, chunk: int, chunks: int, data: memoryview, path: str) -> bool:
    """Say whether `data` is that chunk, of so many, of what has this root."""
    try:
        beside = bytes.fromhex(path)
    except ValueError:
        return False
    found, width, used = _leaf(data), chunks, 0
    while width > 1:
        if chunk ^ 1 < width:
            other = beside[used : used + _HASH_BYTES]
            if len(other) < _HASH_BYTES:
                return False
            used += _HASH_BYTES
            found = _node(other, found) if chunk & 1 else _node(found, other)
        chunk, width = chunk >> 1, (width + 1) >> 1
    return used == len(beside) and found.hex() == root


def group_digest(begin: Begin) -> str:
    """Return the hash of what a leader has told of a group; the same at all members."""
    return _leaf(memoryview(encode(begin))).hex()


def sealed_text(group: str, slice_index: int, commitment: str) -> bytes:
    """Return what a member signs of its contribution to a slice."""
    return f"atom contribution\n{group}\n{slice_index}\n{commitment}".encode()


def mean_text(group: str, slice_index: int, mean: Mean) -> bytes:
    """Return what an owner signs of a mean."""
    what = f"{mean.contributors}\n{mean.digest}\n{mean.shares}\n{mean.commitments}"
    return f"atom mean\n{group}\n{slice_index}\n{what}".encode()


def _leaf(data: memoryview) -> bytes:
    from blake3 import blake3

    return bytes(blake3(data).digest(length=_HASH_BYTES))


def _node(left: bytes, right: bytes) -> bytes:
    from blake3 import blake3

    # A length that no chunk has, a multiple of four: a node cannot be passed off as a chunk.
    return bytes(blake3(b"n" + left + right).digest(length=_HASH_BYTES))
