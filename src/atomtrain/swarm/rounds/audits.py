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
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from atomtrain.swarm.codecs.codec import Codec
from atomtrain.swarm.membership.guards import JUDGED_MEMBERS, Guard, combined, plain_shares
from atomtrain.swarm.rounds.commitments import chunk_spans, leads_to, sealed_text
from atomtrain.swarm.transport.messages import Begin, Evidence

_ROUNDING = 2e-6
"""Of the sum of what is added up: machines may fuse a product with a sum."""
_FAR = 100.0
"""Times the limit of norms that a chunk may be larger than what is usual in its slice. No more is
possible where the limit was kept, and larger ones would hide a false mean in their rounding."""
_BIAS = 0.005
"""Part of the mean by which it may be off along itself, beside the rounding of its codec."""
_DEVIATIONS = 6.0

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Says whether a peer signed some bytes."""


def unsigned(data: bytes) -> bytes:
    """Return no signature: for exchanges whose other members do not look at it."""
    return b""


def unverified(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Take every signature, as `unsigned` makes them."""
    return True


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
    owner_root: str
    """What the owner was committed to, of its own contribution."""
    values: torch.Tensor
    """1-D float32, the decoded mean of the slice."""
    contributors: tuple[int, ...]
    shares: tuple[float, ...]
    codec: Codec
    """That of the mean."""
    guard: Guard

    def flaw(
        self, chunk: int, evidence: Evidence, chunks: Sequence[torch.Tensor], verify: Verify
    ) -> str:
        """Return what `evidence`, and the chunk of each contribution, show to be wrong, or ""."""
        counts = {len(evidence.roots), len(evidence.signatures), len(evidence.paths)}
        if counts != {len(self.contributors)}:
            return "it shows other contributions than its mean has"
        for place, member in enumerate(self.contributors):
            if not self._proved(place, member, chunk, evidence, chunks[place], verify):
                return f"what it shows is not what {self.begin.members[member][-8:]} contributed"
        if not all(bool(torch.isfinite(each).all()) for each in chunks) or self._too_large(chunks):
            return "it counts a contribution that is far larger than others"
        weights = [self.begin.weights[member] for member in self.contributors]
        if self.guard.shares_too_large(self.shares, weights):
            return "it counts some contributions too much"
        expected = combined([each.clone() for each in chunks], self.shares or plain_shares(weights))
        if self._wrong(chunk, expected, chunks):
            return "its mean is not that of the contributions"
        return ""

    def _too_large(self, chunks: Sequence[torch.Tensor]) -> bool:
        if not self.guard.limit or len(chunks) < JUDGED_MEMBERS:
            return False
        norms = [float(torch.linalg.vector_norm(each)) for each in chunks]
        size = float(torch.linalg.vector_norm(self.values))
        share = (chunks[0].numel() / self.values.numel()) ** 0.5
        usual: float = max(statistics.median_low(norms), size * share)
        return max(norms) > _FAR * self.guard.limit * usual

    def _proved(
        self,
        place: int,
        member: int,
        chunk: int,
        evidence: Evidence,
        values: torch.Tensor,
        verify: Verify,
    ) -> bool:
        root, begin = evidence.roots[place], self.begin
        if member == self.owner:
            if root != self.owner_root:
                return False
        else:
            text = sealed_text(begin.round_id, self.slice_index, root)
            signature = signature_bytes(evidence.signatures[place])
            if not verify(begin.members[member], text, signature):
                return False
        data = values.view(torch.uint8).numpy().data
        chunks = len(chunk_spans(self.values.numel()))
        return leads_to(root, chunk, chunks, data, evidence.paths[place])

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


def signature_bytes(text: str) -> bytes:
    """Return a signature that came as hexadecimal digits; none if these are not."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
