"""Anchors: what the swarm last agreed on, fragment by fragment, and what rounds make of it.

An anchor's tensors are never changed once it is in a store: a new anchor replaces the old one, so
that a donor can stream one while the next is being made. Hashes name anchors, and show that members
hold the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.transport.messages import Certificate

HASH = "blake3"
OLD_HASH = "sha256"
"""What checkpoints name that do not say which."""
_DIGITS = 32


class Part(NamedTuple):
    """A span that a round changed, and the ids of the peers whose contributions are in it."""

    span: Span
    contributors: frozenset[str]


@dataclass(frozen=True)
class Origin:
    """Which round made an anchor from its predecessor."""

    round_id: str
    parts: tuple[Part, ...]
    unsigned: Certificate | None = None
    """What members sign of it; None: nobody else was there to the end, or it was fetched."""


NO_ORIGIN = Origin("", ())


@dataclass(frozen=True)
class Anchor:
    """A fragment's agreed parameters, 1-D float32, not to be changed."""

    values: torch.Tensor
    velocity: torch.Tensor | None
    stamp: Stamp
    origin: Origin = NO_ORIGIN
    grouped: bool = False
    """One of several groups agreed on it; `velocity` is None: each member has its own."""
    certificate: Certificate | None = None
    """What goes with it where it is sent; else `Certified` has it, since signatures come late."""


@dataclass(frozen=True)
class Snapshot:
    """A member's parameters at the boundary at which it entered a round."""

    fragment: int
    values: torch.Tensor
    """1-D float32 copy of the local parameters."""
    anchor: Anchor
    """The anchor that the contribution is measured from."""
    weight: int
    """Tokens since this peer's last contribution to the fragment."""
    tokens_seen: int
    """This peer's token count at the snapshot."""
    gradient: bool = False
    """`values` are the contribution itself: a mean gradient."""
    late: bool = False
    """Part of the change was learnt before an anchor that was made without it."""
    residual: torch.Tensor | None = None
    """What encoding lost of earlier contributions, to be added to this one; None is zero."""
    lost: torch.Tensor | None = None
    """What encoding loses of this contribution; filled by the exchange. None: nothing."""
    velocity: torch.Tensor | None = None
    """That of the outer update as this peer has it; None is zero, or none is needed."""

    def contribution(self, span: Span, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the peer has to give in a span: its change, and its residual.

        It is in `out`, 1-D float32 of the span's size, if that is given.
        """
        start, stop = span
        values = self.values[start:stop]
        if self.gradient:
            change = values.clone() if out is None else out.copy_(values)
        else:
            change = torch.sub(values, self.anchor.values[start:stop], out=out)
        return change if self.residual is None else self._with_residual(change, span)

    def _with_residual(self, change: torch.Tensor, span: Span) -> torch.Tensor:
        assert self.residual is not None
        return change.add_(self.residual[span.start : span.stop])


@dataclass(frozen=True)
class Merge:
    """An anchor to put in place, and the snapshot whose change it contains in some spans."""

    fragment: int
    anchor: Anchor
    changed: tuple[Span, ...]
    """Spans in which the new anchor differs from the present one."""
    snapshot: Snapshot | None = None
    contributed: tuple[Span, ...] = ()
    """Spans that contain the snapshot's contribution; disjoint from `changed`."""
    restart: bool = False
    """Drop all that no anchor contains: the parameters become the anchor."""
    velocity: torch.Tensor | None = None
    """What this peer's own velocity becomes with a grouped anchor; None: it stays."""
    donor: str = ""
    """Who gave the anchor, if it was fetched."""

    def as_given(self) -> Merge:
        """Return how to merge the anchor as if others had made it, without any snapshot."""
        elements = self.anchor.values.numel()
        return replace(self, changed=whole(elements), snapshot=None, contributed=())


class Digest:
    """A hash of bytes, given one after the other.

    BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), cut to 128 bits, hashes several blocks
    at once in the processor's wide registers, which matters where each peer hashes a fragment twice
    in a round.
    """

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


def digest_of(values: torch.Tensor, velocity: torch.Tensor | None, name: str = HASH) -> str:
    """Return the hash of an anchor's bytes; releases the interpreter lock for large tensors."""
    digest = Digest(name)
    digest.update(byte_view(values))
    if velocity is not None:
        digest.update(byte_view(velocity))
    return digest.text()


def whole(elements: int) -> tuple[Span, ...]:
    """Return the one span that covers a fragment."""
    return (Span(0, elements),)


def joined_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return parts with neighbours of the same contributors joined to one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.span.stop == part.span.start and last.contributors == part.contributors:
            found[-1] = Part(Span(last.span.start, part.span.stop), last.contributors)
        else:
            found.append(part)
    return tuple(found)


def split_parts(parts: Iterable[Part], peer_id: str) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the spans without, and those with, a contribution of `peer_id`."""
    parts = tuple(parts)
    with_peer = tuple(part.span for part in parts if peer_id in part.contributors)
    return tuple(p.span for p in parts if peer_id not in p.contributors), with_peer
