"""Audits: what an owner can show of its mean, and what it cannot."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atomtrain.swarm.codecs.codec import Codec, codec_named, decode_span, encode_span
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.codecs.slices import slices_per_member, streams_per_neighbour
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.rounds.audits import Claim, challenge
from atomtrain.swarm.rounds.commitments import (
    Commitment,
    Tree,
    chunk_elements,
    chunk_spans,
    committed,
    group_digest,
    leads_to,
    leaves_of,
    sealed_text,
)
from atomtrain.swarm.transport.messages import Begin, Evidence, Mean

MEMBERS = ("a", "b", "c", "d")
BEGIN = Begin(
    round_id="7-a-1", members=MEMBERS, weights=(10, 20, 10, 10), late=(False,) * 4,
    exchange_s=20.0, bases=False, version=0, tokens=0, groups=1,
)  # fmt: skip
OWNER = 2
GUARD = Guard(limit=10.0, mean="clipped")
LONG = "its mean is longer than what it is the mean of"


def sign(peer_id: str, data: bytes) -> bytes:
    return hashlib.sha256(peer_id.encode() + data).digest()


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    return signature == sign(peer_id, data)


class Slice(NamedTuple):
    """What an owner holds of a slice, and what it has sent as its mean."""

    contributions: tuple[torch.Tensor, ...]
    values: torch.Tensor
    shares: tuple[float, ...]
    codec: Codec

    def evidence(self, chunk: int) -> tuple[Evidence, list[torch.Tensor]]:
        own = [committed(values) for values in self.contributions]
        signed = [sign(m, sealed_text(group_digest(BEGIN), 5, o.commitment.text)).hex()
                  for m, o in zip(MEMBERS, own, strict=True)]  # fmt: skip
        start, stop = chunk_spans(self.values.numel())[chunk]
        return (
            Evidence(
                signatures=tuple(signed),
                paths=tuple(one.tree.path(chunk) for one in own),
            ),
            [values[start:stop].clone() for values in self.contributions],
        )

    def claim(self) -> Claim:
        told = tuple(committed(values).commitment.text for values in self.contributions)
        return Claim(
            begin=BEGIN,
            owner=OWNER,
            slice_index=5,
            owner_commitment=told[OWNER],
            mean=Mean(contributors=(0, 1, 2, 3), digest="", shares=self.shares, commitments=told,
                      signature=""),
            values=self.values,
            codec=self.codec,
            guard=GUARD,
        )  # fmt: skip

    def flaw(self, chunk: int) -> str:
        return flaw(self.claim(), chunk, *self.evidence(chunk))


def flaw(claim: Claim, chunk: int, evidence: Evidence, chunks: list[torch.Tensor]) -> str:
    """Return what an auditor finds wrong, in its order, or ""."""
    return claim.unproved(chunk, evidence, chunks, verify) or claim.wrong(chunk, chunks)


def telling(claim: Claim, *commitments: str) -> Claim:
    """Return a claim whose owner tells other commitments."""
    return dataclasses.replace(claim, mean=replace(claim.mean, commitments=commitments))


def decoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values)
    decode_span(codec, encode_span(codec, values), out)
    return out


def owned(
    wire: str = "float32",
    elements: int = 40_000,
    lie: Callable[[torch.Tensor], torch.Tensor] = lambda mean: mean,
    seed: int = 1,
) -> Slice:
    """Return a slice of members that learn something in common; `lie` is what its owner makes."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(elements, generator=generator)
    codec = codec_named(wire)
    values = tuple(
        decoded(codec, common + torch.randn(elements, generator=generator)) for _ in MEMBERS
    )
    made = GUARD.mean_of({i: one.clone() for i, one in enumerate(values)}, BEGIN.weights)
    mean = codec.for_mean(len(values), 17)
    return Slice(values, decoded(mean, lie(made.values)), made.shares, mean)


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_an_honest_mean_has_no_flaw(wire: str) -> None:
    for elements in (100, 5_000, 300_000):
        honest = owned(wire, elements)
        chunks = len(chunk_spans(elements))
        for chunk in {0, chunks // 2, chunks - 1}:
            assert honest.flaw(chunk) == ""


@pytest.mark.parametrize("wire", CODEC_NAMES)
@pytest.mark.parametrize("factor", [-5.0, -1.0, 0.0, 0.98, 1.02])
def test_a_mean_that_is_off_by_two_in_a_hundred_is_wrong_in_every_chunk(
    wire: str, factor: float
) -> None:
    false = owned(wire, 300_000, lambda mean: mean * factor)
    chunks = len(chunk_spans(300_000))
    found = [false.flaw(chunk) for chunk in range(0, chunks, 50)]
    said = LONG if factor == -5.0 else "its mean is not that of the contributions"
    assert found == [said] * len(found)


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_a_mean_that_is_too_long_is_seen_without_an_audit(wire: str) -> None:
    """Alike contributions have a mean as long as they are: what is twice as long is none."""
    for elements in (1, 100, 40_000):
        alike = owned(wire, elements, seed=3)
        alike = alike._replace(contributions=(alike.contributions[0],) * 4)
        honest = decoded(alike.codec, alike.contributions[0].clone())
        assert alike._replace(values=honest, shares=()).claim().impossible() == ""
        long = alike._replace(values=decoded(alike.codec, 2.5 * honest), shares=())
        assert long.claim().impossible() == LONG


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    st.lists(st.floats(-8, 8), min_size=4, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from(CODEC_NAMES),
)
def test_no_honest_mean_is_impossible(
    weights: list[int], scales: list[float], seed: int, wire: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codec, guard = codec_named(wire), Guard(limit=0.0, mean="clipped")
    values = [decoded(codec, torch.randn(300, generator=generator) * 10**scale)
              for scale in scales[: len(weights)]]  # fmt: skip
    made = guard.mean_of({i: one.clone() for i, one in enumerate(values)}, weights)
    mean = codec.for_mean(len(values), seed)
    claim = Claim(
        begin=replace(BEGIN, weights=(*weights, 1, 1, 1)[:4]), owner=0, slice_index=0,
        owner_commitment="", values=decoded(mean, made.values), codec=mean, guard=guard,
        mean=Mean(contributors=tuple(range(len(values))), digest="", shares=made.shares,
                  commitments=tuple(committed(v).commitment.text for v in values), signature=""),
    )  # fmt: skip
    assert claim.impossible() == ""


@pytest.mark.parametrize("told", [(), ("",) * 4, ("00 1.0",) * 3, ("00 1.0",) * 5])
def test_an_owner_that_tells_no_commitments_has_no_mean(told: tuple[str, ...]) -> None:
    claim = telling(owned().claim(), *told)
    assert claim.impossible() == "it tells no commitments of its contributions"


def test_a_lie_in_one_chunk_is_found_there() -> None:
    def lie(mean: torch.Tensor) -> torch.Tensor:
        return torch.cat((mean[:-64], mean[-64:] * 1.02))

    false = owned("float16", 40_000, lie)
    last = len(chunk_spans(40_000)) - 1
    assert false.flaw(last) == "its mean is not that of the contributions"
    assert false.flaw(0) == ""


def test_an_owner_can_show_only_what_its_contributors_signed() -> None:
    honest = owned()
    evidence, chunks = honest.evidence(3)
    changed = torch.cat((chunks[0][:-1], chunks[0][-1:] + 1))
    said = "what it shows is not what a contributed"
    assert flaw(honest.claim(), 3, evidence, [changed, *chunks[1:]]) == said
    other, its_chunks = owned(seed=2).evidence(3)
    forged = replace(evidence, paths=(other.paths[0], *evidence.paths[1:]))
    told, another = (owned(seed=seed).claim().mean.commitments for seed in (1, 2))
    claim = telling(honest.claim(), another[0], *told[1:])
    assert flaw(claim, 3, forged, [its_chunks[0], *chunks[1:]]) == said
    assert flaw(honest.claim(), 4, evidence, chunks) == said, "another chunk"
    no_hex = replace(evidence, signatures=("zz", *evidence.signatures[1:]))
    assert flaw(honest.claim(), 3, no_hex, chunks) == said
    short = replace(evidence, paths=evidence.paths[1:])
    assert "other contributions" in flaw(honest.claim(), 3, short, chunks[1:])
    assert "other contributions" in flaw(telling(honest.claim(), *told[1:]), 3, evidence, chunks)


def test_an_owner_is_held_to_its_own_contribution_which_it_named_first() -> None:
    """Otherwise it could choose the one that makes a false mean right."""
    honest, other = owned(), owned(seed=2)
    swapped = (*honest.contributions[:OWNER], other.contributions[OWNER], honest.contributions[3])
    false = honest._replace(contributions=swapped)
    claim = dataclasses.replace(false.claim(), owner_commitment=honest.claim().owner_commitment)
    assert flaw(claim, 0, *false.evidence(0)) == "what it shows is not what c contributed"


@pytest.mark.parametrize(
    "shares",
    [
        (1.0, 0.0, 0.0, 0.0),
        (0.3, 0.3, 0.3, 0.3),
        (0.25, 0.25, 0.25),
        (0.1, 0.1, 0.1, 0.7),
        (0.1, 0.1, 0.1, 0.1),
    ],
)
def test_an_owner_cannot_choose_whose_contribution_counts(shares: tuple[float, ...]) -> None:
    honest = owned()
    values = sum(v * s for v, s in zip(honest.contributions, shares, strict=False))
    assert isinstance(values, torch.Tensor)
    false = honest._replace(values=values, shares=shares)
    assert false.flaw(0) == "it counts some contributions too much, or too little"


@pytest.mark.parametrize("size", [1e18, float("inf"), float("nan")])
def test_contributions_without_limit_do_not_hide_a_false_mean(size: float) -> None:
    """One that agrees signs numbers whose rounding, or sum, would be as good as any mean."""
    honest = owned()
    large = torch.full_like(honest.values, size)
    signed = (*honest.contributions[:3], large)
    false = honest._replace(contributions=signed, values=torch.full_like(honest.values, 3.0))
    said = false.flaw(0)
    assert said in (
        "it counts a contribution that is far larger than others",
        "what it shows is not what d contributed",
    )
    told = false.evidence(0)
    less = Commitment(Tree(leaves_of(large, large.numel())).root, 1.0).text
    signature = sign("d", sealed_text(group_digest(BEGIN), 5, less)).hex()
    smaller = replace(told[0], signatures=(*told[0].signatures[:3], signature))
    claim = telling(false.claim(), *false.claim().mean.commitments[:3], less)
    said = flaw(claim, 0, smaller, told[1])
    assert said == "what it shows is not what d contributed", "the norm is not that of the chunk"


@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=16),
    st.lists(st.floats(-30, 30), min_size=16, max_size=16),
    st.integers(0, 10**6),
)
def test_no_honest_owner_counts_too_much_or_too_little(
    weights: list[int], scales: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {
        i: torch.randn(64, generator=generator) * scales[i] + scales[-i - 1]
        for i in range(len(weights))
    }
    assert GUARD.admits(GUARD.mean_of(values, weights).shares, weights)


@pytest.mark.parametrize("text", ["", "00", "00 x", "00 nan", "00 inf", "00  1.0", "00 1"])
def test_what_is_not_a_commitment_is_none(text: str) -> None:
    assert Commitment.read(text) is None
    assert Commitment.read(Commitment("00", 1.5).text) == Commitment("00", 1.5)


def test_clipped_shares_are_believed_where_they_are_right() -> None:
    honest = owned()
    far = {i: v.clone() for i, v in enumerate(honest.contributions)}
    far[3].mul_(-9)
    made = GUARD.mean_of({i: v.clone() for i, v in far.items()}, BEGIN.weights)
    assert made.shares
    assert honest._replace(contributions=tuple(far.values()), values=made.values,
                           shares=made.shares).flaw(0) == ""  # fmt: skip
    assert Guard(limit=10.0, mean="plain").admits((), BEGIN.weights)
    assert not Guard(limit=10.0, mean="plain").admits(made.shares, BEGIN.weights)


@given(st.integers(1, 2_000), st.data())
def test_every_chunk_leads_to_its_root_and_nothing_else_does(
    elements: int, data: st.DataObject
) -> None:
    values = torch.arange(elements, dtype=torch.float32)
    tree, spans = Tree(leaves_of(values, elements)), chunk_spans(elements)
    chunk = data.draw(st.integers(0, len(spans) - 1))
    start, stop = spans[chunk]
    shown = values[start:stop].numpy().tobytes()
    path = tree.path(chunk)
    assert leads_to(tree.root, chunk, len(spans), memoryview(shown), path)
    place = data.draw(st.integers(0, len(shown) - 1))
    spoilt = shown[:place] + bytes([shown[place] ^ 1]) + shown[place + 1 :]
    assert not leads_to(tree.root, chunk, len(spans), memoryview(spoilt), path)
    other = data.draw(st.integers(0, len(spans) - 1))
    if other != chunk:
        assert not leads_to(tree.root, other, len(spans), memoryview(shown), path)
    for wrong in (path + "00" * 16, path[:-2], "x", "é"):
        assert wrong == path or not leads_to(tree.root, chunk, len(spans), memoryview(shown), wrong)


def test_pieces_of_a_slice_have_the_leaves_of_the_whole() -> None:
    values = torch.randn(5_000)
    step = 4 * chunk_elements(5_000)
    pieces = [values[start : start + step] for start in range(0, 5_000, step)]
    leaves = [leaf for piece in pieces for leaf in leaves_of(piece, 5_000)]
    assert leaves == leaves_of(values, 5_000)


def test_what_is_drawn_is_never_of_an_empty_slice() -> None:
    assert challenge([]) is None
    assert challenge([(3, 0)]) is None
    for _ in range(20):
        drawn = challenge([(3, 0), (4, 100)])
        assert drawn is not None
        assert drawn.slice_index == 4
        assert drawn.chunk < len(chunk_spans(100))


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_decoded_means_are_within_their_codecs_error(wire: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 1e-6, 0.0):
        values = torch.randn(20_000, generator=generator) ** 3 * scale
        values[torch.rand(20_000, generator=generator) < 0.9] = 0.0
        codec = codec_named(wire).for_mean(8, 5)
        out = decoded(codec, values)
        assert bool(((out - values).abs() <= codec.error(out)).all())


def test_a_false_chunk_of_a_hundred_is_found_within_fifty_rounds_of_four() -> None:
    """With 95%: each of the others draws one chunk on each lane that has slices of the owner's."""
    members, rounds = 4, 50
    each = slices_per_member(25_000_000, members)
    lanes = min(each, 2 * streams_per_neighbour(members, each))
    assert 0.99 ** ((members - 1) * lanes * rounds) < 0.05
