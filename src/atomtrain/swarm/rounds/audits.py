"""Audits: whether an owner's mean is the mean of what its contributors have sealed.

After a mean has come, its receiver draws a chunk of it, asks the owner to show that chunk of every
contribution, and does the sum again. The owner cannot know which chunk that will be. It can show
only what its contributors have signed, or, for its own contribution, what it was committed to
before it heard of any other's.

A mean that is wrong everywhere is found by everybody at once. One that is wrong in a part of its
chunks is found by each receiver with that probability, in each round.
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
from atomtrain.swarm.transport.messages import Begin, Evidence

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
    values: torch.Tensor
    """1-D float32, the decoded mean of the slice."""
    contributors: tuple[int, ...]
    shares: tuple[float, ...]
    codec: Codec
    """That of the mean."""
    guard: Guard

    def unproved(
        self, chunk: int, evidence: Evidence, chunks: Sequence[torch.Tensor], verify: Verify
    ) -> str:
        """Return what is not as the contributors signed it, or ""; blames who shows it."""
        counts = {len(evidence.commitments), len(evidence.signatures), len(evidence.paths)}
        if counts != {len(self.contributors)}:
            return "it shows other contributions than its mean has"
        for place, member in enumerate(self.contributors):
            if not self._proved(place, member, chunk, evidence, chunks[place], verify):
                return f"what it shows is not what {self.begin.members[member][-8:]} contributed"
        return ""

    def wrong(self, chunk: int, evidence: Evidence, chunks: Sequence[torch.Tensor]) -> str:
        """Return what is wrong with a mean of contributions that are proved, or ""."""
        norms = {
            member: found.norm
            for member, text in zip(self.contributors, evidence.commitments, strict=True)
            if (found := Commitment.read(text)) is not None
        }
        if self.guard.too_large(norms, self.values.numel(), self.begin.weights):
            return "it counts a contribution that is far larger than others"
        weights = [self.begin.weights[member] for member in self.contributors]
        if not self.guard.admits(self.shares, weights):
            return "it counts some contributions too much, or too little"
        expected = combined([each.clone() for each in chunks], self.shares or plain_shares(weights))
        if self._wrong(chunk, expected, chunks):
            return "its mean is not that of the contributions"
        return ""

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
        told = evidence.commitments[place]
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
        shares = self.shares or plain_shares([self.begin.weights[m] for m in self.contributors])
        added = torch.zeros_like(expected)
        for each, share in zip(contributions, shares, strict=True):
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
