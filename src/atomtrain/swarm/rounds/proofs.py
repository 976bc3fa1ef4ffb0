"""Proofs: what one member has seen of an owner's lie, for others who were not there.

An owner signs its mean: the hash of what travelled, whose contributions are in it, what each
counts, and their commitments. Contributors sign their commitments. So the mean, a chunk
of each contribution and these signatures are all that is needed to do the sum again: nobody's word
counts. Who accuses cannot change any of it, and no honest owner signs a mean that the sum does not
make. A lie that shows only to who was there, such as other evidence than was signed, has no proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import Codec, decode_span
from atomtrain.swarm.codecs.slices import Span, piece_spans, slice_spans, slices_per_member
from atomtrain.swarm.membership.guards import Guard, bounded_weights
from atomtrain.swarm.rounds.audits import Claim, Verify, signature_bytes
from atomtrain.swarm.rounds.commitments import chunk_spans, group_digest, mean_text
from atomtrain.swarm.rounds.owning import mean_codec, mean_digest
from atomtrain.swarm.transport.messages import Proof


class Proven(NamedTuple):
    """A proof, and the bytes that follow it."""

    proof: Proof
    data: bytes


class Judged(NamedTuple):
    """What a proof shows."""

    owner: str
    flaw: str
    """Empty: nothing."""


class Rulebook(NamedTuple):
    """What all peers of a run know alike, by which proofs are checked."""

    fragment_elements: Sequence[int]
    codec: Codec
    guard: Guard


class _Sizes(NamedTuple):
    owner: int
    elements: int
    codec: Codec
    pieces: list[int]
    chunk: Span


def proof_bytes(proof: Proof, rules: Rulebook) -> int:
    """Return how many bytes follow a proof.

    Raises:
        BadMessage: it speaks of what this run does not have.
    """
    sizes = _sizes(proof, rules)
    return sum(sizes.pieces) + 4 * sizes.chunk.elements * len(proof.mean.contributors)


def accused(proof: Proof, rules: Rulebook) -> str:
    """Return whose mean a proof is about.

    Raises:
        BadMessage: it speaks of what this run does not have.
    """
    return proof.begin.members[_sizes(proof, rules).owner]


def judge_proof(proven: Proven, rules: Rulebook, verify: Verify) -> Judged:
    """Return whose mean a proof shows to be wrong, and why; checks every part of it.

    Raises:
        BadMessage: it speaks of what this run does not have.
    """
    proof, sizes = proven.proof, _sizes(proven.proof, rules)
    begin, mean, data = proof.begin, proof.mean, memoryview(bytearray(proven.data))
    owner, group = begin.members[sizes.owner], group_digest(begin)
    signed = mean_text(group, proof.slice_index, mean)
    if len(data) != proof_bytes(proof, rules) or not verify(
        owner, signed, signature_bytes(mean.signature)
    ):
        return Judged(owner, "")
    pieces, at = [], 0
    for size in sizes.pieces:
        pieces.append(data[at : at + size])
        at += size
    told = mean.contributors, mean.commitments
    if mean_digest(*told, pieces, proof.base_digest) != mean.digest:
        return Judged(owner, "")
    values = torch.empty(sizes.elements)
    decode_span(sizes.codec, pieces, values)
    chunks = [
        torch.frombuffer(data[at + 4 * i * sizes.chunk.elements :], dtype=torch.float32,
                         count=sizes.chunk.elements)
        for i in range(len(mean.contributors))
    ]  # fmt: skip
    claim = Claim(
        begin=begin,
        owner=sizes.owner,
        slice_index=proof.slice_index,
        # It has signed its own commitment with the others'.
        owner_commitment=dict(zip(*told, strict=False)).get(sizes.owner, ""),
        mean=mean,
        values=values,
        codec=sizes.codec,
        guard=rules.guard,
    )
    if claim.unproved(proof.chunk, proof.evidence, chunks, verify):
        return Judged(owner, "")
    return Judged(owner, claim.wrong(proof.chunk, chunks))


def _sizes(proof: Proof, rules: Rulebook) -> _Sizes:
    begin, counted = proof.begin, proof.mean.contributors
    members = len(begin.members)
    known = proof.fragment < len(rules.fragment_elements) and members > 0
    if (
        not known
        or len(begin.weights) != members
        or begin.weights != bounded_weights(begin.weights)
    ):
        raise BadMessage("a proof of a group that there cannot be")
    elements = rules.fragment_elements[proof.fragment]
    each = slices_per_member(elements, members)
    if proof.slice_index >= members * each or len(set(begin.members)) != members:
        raise BadMessage("a proof of a slice that there cannot be")
    weighing = {member for member, weight in enumerate(begin.weights) if weight > 0}
    if not counted or len(set(counted)) != len(counted) or not set(counted) <= weighing:
        raise BadMessage("a proof of a mean of members that cannot count")
    span = slice_spans(elements, members * each)[proof.slice_index]
    spans = chunk_spans(span.elements)
    if proof.chunk >= len(spans):
        raise BadMessage("a proof of a chunk that there cannot be")
    codec = mean_codec(rules.codec, begin, proof.slice_index, len(counted))
    pieces = [codec.encoded_bytes(b - a) for a, b in piece_spans(Span(0, span.elements))]
    owner = proof.slice_index // each
    return _Sizes(owner, span.elements, codec, pieces, spans[proof.chunk])
