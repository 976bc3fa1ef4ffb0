"""Audits: whether an owner's mean is the mean of what its contributors have sealed.

After a mean has come, its receiver draws a chunk of it, asks the owner to show that chunk of every
contribution, and does the sum again. The owner cannot know which chunk that will be. It can show
only what its contributors have signed, or, for its own contribution, what it was committed to
before it heard of any other's.

A mean that is wrong everywhere is found by everybody at once. One that is wrong in a part of its
chunks is found by each receiver with that probability, in each round. Beside that, what an owner
tells of a mean must fit together, which costs next to nothing and is checked of each one: it is no
longer than what it is the mean of.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from atomtrain.swarm.codecs.codec import Codec, square_of
from atomtrain.swarm.membership.guards import NORM_ROUNDING, Guard, combined, plain_shares
from atomtrain.swarm.rounds.commitments import (
    Commitment,
    chunk_spans,
    group_digest,
    leads_to,
    sealed_text,
)
from atomtrain.swarm.transport.messages import Begin, Evidence, Mean

_ROUNDING = 2e-6
"""Of the sum of what is added up: machines may fuse a product with a sum."""
_BIAS = 0.005
"""Part of the mean by which it may be off along itself, beside the rounding of its codec."""
_DEVIATIONS = 6.0

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Says whether a peer signed some bytes."""


class Challenge(NamedTuple):
    """A chunk of a slice that its owner has to show."""

    slice_index: int
    chunk: int


def challenge(slices: Sequence[tuple[int, int]]) -> Challenge | None:
    """Draw a chunk of one of these slices, of an index and so many elements each.

    None if they are empty. Nobody must be able to know what is drawn.
    """
    chosen = [(index, elements) for index, elements in slices if elements]
    if not chosen:
        return None
    index, elements = chosen[secrets.randbelow(len(chosen))]
    return Challenge(index, secrets.randbelow(len(chunk_spans(elements))))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A mean as its receiver has it, and what it is to be judged by."""

    begin: Begin
    owner: int
    slice_index: int
    owner_commitment: str
    """To the owner's own contribution; it has come before any other's went to the owner."""
    mean: Mean
    """What the owner has signed of it."""
    values: torch.Tensor
    """1-D float32, the decoded mean of the slice."""
    codec: Codec
    """That of the mean."""
    guard: Guard

    def unproved(
        self, chunk: int, evidence: Evidence, chunks: Sequence[torch.Tensor], verify: Verify
    ) -> str:
        """Return what is not as the contributors signed it, or ""; blames who shows it."""
        counted, told = self.mean.contributors, self.mean.commitments
        if {len(told), len(evidence.signatures), len(evidence.paths)} != {len(counted)}:
            return "it shows other contributions than its mean has"
        for place, member in enumerate(counted):
            if not self._proved(place, member, chunk, evidence, chunks[place], verify):
                return f"what it shows is not what {self.begin.members[member][-8:]} contributed"
        return ""

    def impossible(self) -> str:
        """Return what is wrong with a mean by what its owner tells of it alone, or "".

        It tells the norms of the contributions: of a sum of them, each times its share, the norm
        cannot be more than that of the norms.
        """
        counted, found = self.mean.contributors, [*map(Commitment.read, self.mean.commitments)]
        norms = {m: one.norm for m, one in zip(counted, found, strict=False) if one is not None}
        if not len(norms) == len(counted) == len(found):
            return "it tells no commitments of its contributions"
        if self.guard.too_large(norms, self.values.numel(), self.begin.weights):
            return "it counts a contribution that is far larger than others"
        if not self.guard.admits(self.mean.shares, self._weights):
            return "it counts some contributions too much, or too little"
        longest = sum(s * norms[m] for m, s in zip(counted, self._shares, strict=True))
        longest *= 1.0 + 2 * NORM_ROUNDING
        # What rounding adds is looked at only where it matters.
        if not within(self.values, longest) and not within(
            self.values, longest + float(self.codec.error(self.values).norm())
        ):
            return "its mean is longer than what it is the mean of"
        return ""

    def wrong(self, chunk: int, chunks: Sequence[torch.Tensor]) -> str:
        """Return what is wrong with a mean of contributions that are proved, or ""."""
        if flaw := self.impossible():
            return flaw
        expected = combined([each.clone() for each in chunks], self._shares)
        if self._wrong(chunk, expected, chunks):
            return "its mean is not that of the contributions"
        return ""

    @property
    def _weights(self) -> list[int]:
        return [self.begin.weights[member] for member in self.mean.contributors]

    @property
    def _shares(self) -> tuple[float, ...]:
        """What each contribution counts."""
        return self.mean.shares or plain_shares(self._weights)

    def _proved(
        self,
        place: int,
        member: int,
        chunk: int,
        evidence: Evidence,
        values: torch.Tensor,
        verify: Verify,
    ) -> bool:
        """Say whether the chunk that is shown of a contributor is part of what it is bound to."""
        told = self.mean.commitments[place]
        if member == self.owner:
            signed = told == self.owner_commitment
        else:
            text = sealed_text(group_digest(self.begin), self.slice_index, told)
            signature = signature_bytes(evidence.signatures[place])
            signed = verify(self.begin.members[member], text, signature)
        commitment = Commitment.read(told)
        if not signed or commitment is None or not within(values, commitment.norm):
            return False
        data = values.view(torch.uint8).numpy().data
        chunks = len(chunk_spans(self.values.numel()))
        return leads_to(commitment.root, chunk, chunks, data, evidence.paths[place])

    def _wrong(
        self, chunk: int, expected: torch.Tensor, contributions: Sequence[torch.Tensor]
    ) -> bool:
        start, stop = chunk_spans(self.values.numel())[chunk]
        added = torch.zeros_like(expected)
        for each, share in zip(contributions, self._shares, strict=True):
            added.add_(each.abs(), alpha=share)
        error = self.codec.error(self.values)[start:stop]
        off = self.values[start:stop] - expected
        if bool((off.abs() > error + _ROUNDING * added).any()):
            return True
        # Rounding is as often up as down, so a mean that is off along itself shows before long.
        square = float(torch.dot(expected, expected))
        if square <= 0.0:
            return False
        noise = math.sqrt(float(torch.dot((error / 2) ** 2, expected**2))) / square
        rounding = _ROUNDING * float(torch.dot(added, expected.abs())) / square
        bias = abs(float(torch.dot(off, expected))) / square
        return bias > _BIAS + _DEVIATIONS * noise + rounding


def within(values: torch.Tensor, norm: float) -> bool:
    """Say whether numbers, all finite, can be part of what has this norm."""
    square = square_of(values)
    return square is not None and square**0.5 <= norm * (1.0 + NORM_ROUNDING)


def signature_bytes(text: str) -> bytes:
    """Return a signature that came as hexadecimal digits; none if these are not."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
