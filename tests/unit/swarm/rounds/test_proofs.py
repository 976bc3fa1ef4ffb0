"""Proofs: who was not there sees an owner's lie, too; and no accusation harms an honest one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import byte_view, codec_named, encode_span
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.rounds.commitments import (
    chunk_spans,
    committed,
    group_digest,
    mean_text,
    sealed_text,
)
from atomtrain.swarm.rounds.owning import OwnedSlice, mean_codec, mean_digest
from atomtrain.swarm.rounds.proofs import Proven, Rulebook, accused, judge_proof, proof_bytes
from atomtrain.swarm.transport.messages import (
    Accuse,
    Begin,
    Evidence,
    Heard,
    Mean,
    Proof,
    decode,
    encode,
)
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_audits import LONG, decoded, sign, verify
from tests.unit.swarm.rounds.test_lying_owners import HONEST, LIAR, lied, trusted

MEMBERS, OWNER, ELEMENTS = ("a", "b", "c", "d"), 2, 4_000
BEGIN = Begin(
    round_id="7-a-1", members=MEMBERS, weights=(10, 20, 10, 10), late=(False,) * 4,
    exchange_s=20.0, bases=False, version=0, tokens=0, groups=1,
)  # fmt: skip
GUARD = Guard(limit=10.0, mean="clipped")
FALSE = "its mean is not that of the contributions"


def rulebook(wire: str) -> Rulebook:
    return Rulebook((50, 4 * ELEMENTS), codec_named(wire), GUARD)


def proven(
    factor: float, wire: str = "float16", chunk: int = 3, base: str = "", by: str = "c"
) -> Proven:
    """Return what is told of a mean that is `factor` times what it should be."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(ELEMENTS, generator=generator)
    values = [
        decoded(codec_named(wire), common + torch.randn(ELEMENTS, generator=generator))
        for _ in MEMBERS
    ]
    made = GUARD.mean_of({i: one.clone() for i, one in enumerate(values)}, BEGIN.weights)
    pieces = encode_span(mean_codec(codec_named(wire), BEGIN, OWNER, 4), factor * made.values)
    own, group = [committed(one) for one in values], group_digest(BEGIN)
    texts = tuple(one.commitment.text for one in own)
    mean = Mean(
        contributors=(0, 1, 2, 3), digest=mean_digest((0, 1, 2, 3), texts, pieces, base),
        shares=made.shares, commitments=texts, signature="",
    )  # fmt: skip
    mean = replace(mean, signature=sign(by, mean_text(group, OWNER, mean)).hex())
    evidence = Evidence(
        signatures=tuple(
            "" if m == OWNER else sign(MEMBERS[m], sealed_text(group, OWNER, text)).hex()
            for m, text in enumerate(texts)
        ),
        paths=tuple(one.tree.path(chunk) for one in own),
    )
    start, stop = chunk_spans(ELEMENTS)[chunk]
    shown = [byte_view(one[start:stop].contiguous()) for one in values]
    proof = Proof(
        begin=BEGIN, fragment=1, slice_index=OWNER, base_digest=base, mean=mean, chunk=chunk,
        evidence=evidence,
    )  # fmt: skip
    return Proven(proof, b"".join(bytes(piece) for piece in (*pieces, *shown)))


@pytest.mark.parametrize("wire", CODEC_NAMES)
@pytest.mark.parametrize("base", ["", "ab" * 16])
def test_a_false_mean_is_proved_and_an_honest_one_is_not(wire: str, base: str) -> None:
    last = len(chunk_spans(ELEMENTS)) - 1
    for chunk in (0, 3, last) if wire != "topk" else (0,):  # which sends nothing of some chunks
        for factor, flaw in ((-5.0, LONG), (-1.0, FALSE), (1.0, "")):
            told = proven(factor, wire, chunk, base)
            assert proof_bytes(told.proof, rulebook(wire)) == len(told.data)
            assert judge_proof(told, rulebook(wire), verify) == ("c", flaw)
            assert decode(encode(told.proof)) == told.proof, "as it comes over a stream"


def changed(told: Proven, **fields: Any) -> Proven:
    return Proven(replace(told.proof, **fields), told.data)


def of_mean(told: Proven, **fields: Any) -> Proven:
    return changed(told, mean=replace(told.proof.mean, **fields))


def of_evidence(told: Proven, **fields: Any) -> Proven:
    return changed(told, evidence=replace(told.proof.evidence, **fields))


OTHER = "00" * 16 + " 1.0"
FRAMES: dict[str, Callable[[], Proven]] = {
    "a mean that its owner did not sign": lambda: proven(-5.0, by="a"),
    "another mean than was signed": lambda: Proven(
        proven(1.0).proof, proven(-5.0).data),
    "other shares": lambda: of_mean(proven(1.0), shares=(0.7, 0.1, 0.1, 0.1)),
    "other contributors": lambda: of_mean(proven(1.0), contributors=(0, 1, 3, 2)),
    "another group": lambda: changed(proven(1.0), begin=replace(BEGIN, weights=(10, 90, 10, 10))),
    "another slice": lambda: changed(proven(1.0), slice_index=1),
    "another chunk": lambda: changed(proven(1.0), chunk=4),
    "another base": lambda: changed(proven(1.0), base_digest="cd" * 16),
    "what a contributor signed later": lambda: of_evidence(
        of_mean(proven(1.0), commitments=(OTHER, *proven(1.0).proof.mean.commitments[1:])),
        signatures=(sign("a", sealed_text(group_digest(BEGIN), OWNER, OTHER)).hex(),
                    *proven(1.0).proof.evidence.signatures[1:]),
    ),
    "no signatures": lambda: of_evidence(proven(-5.0), signatures=("",) * 4),
    "too few commitments": lambda: of_mean(proven(-5.0), commitments=()),
    "other paths": lambda: of_evidence(proven(-5.0), paths=("00" * 16,) * 4),
    "a byte too few": lambda: Proven(proven(-5.0).proof, proven(-5.0).data[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("what", FRAMES)
def test_no_honest_owner_is_framed(what: str) -> None:
    try:
        found = judge_proof(FRAMES[what](), rulebook("float16"), verify)
    except BadMessage:
        return
    assert found.flaw == ""


@settings(max_examples=50, deadline=None)
@given(at=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_any_changed_bit_of_an_honest_owners_bytes_proves_nothing(at: int, bit: int) -> None:
    honest = proven(1.0)
    data = bytearray(honest.data)
    data[at % len(data)] ^= 1 << bit
    assert judge_proof(Proven(honest.proof, bytes(data)), rulebook("float16"), verify).flaw == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"fragment": 2}, {"slice_index": 4}, {"chunk": 10**6},
        {"begin": replace(BEGIN, members=())}, {"begin": replace(BEGIN, members=("a",) * 4)},
        {"begin": replace(BEGIN, weights=(1,))},
    ],
)  # fmt: skip
def test_what_this_run_does_not_have_is_no_proof(fields: dict[str, Any]) -> None:
    told = changed(proven(-5.0), **fields)
    for check in (lambda: accused(told.proof, rulebook("float16")),
                  lambda: judge_proof(told, rulebook("float16"), verify)):  # fmt: skip
        with pytest.raises(BadMessage, match="a proof of"):
            check()


@pytest.mark.slow
def test_who_has_seen_nothing_expels_a_liar_by_anothers_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In groups of two only one of the others is there when the liar lies."""
    monkeypatch.setattr(OwnedSlice, "_encode", lied(lambda mean: -mean))
    told: list[str] = []
    simulation = Simulation((4000, 900), 5, 0.02, wire="float16", mean="plain", group_size=3)

    async def scenario() -> None:
        for name in (*HONEST, LIAR):
            await simulation.add(name, step_s=0.5)
        for peer in simulation.peers.values():
            distrust = peer.service.context.roster.distrust

            def noted(peer_id: str, why: str, distrust: Any = distrust) -> None:
                told.append(why)
                distrust(peer_id, why)

            peer.service.context.roster.distrust = noted  # type: ignore[method-assign]
        await asyncio.sleep(40)

    run_virtual(scenario)
    for name in HONEST:
        assert trusted(simulation)[name] == {*HONEST} - {name}
    assert any("has proved" in why for why in told), told


def test_hearsay_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation((400, 90), 5, 0.02)

    async def scenario() -> None:
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(4)
        context = simulation.peers["a"].service.context
        for told in (None, proven(-5.0), proven(1.0)):
            channel = await context.open("b")
            heard = await context.ask(channel, Accuse(peer_id="c"), Heard)
            assert heard.wanted
            if told is not None:
                await channel.send(changed(told, fragment=0).proof)
                await channel.send_bytes(told.data[:100])
            channel.close()
            await asyncio.sleep(1)
        await asyncio.sleep(10)

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert trusted(simulation)["b"] == {"a", "c"}
    assert "counts as gone" not in caplog.text
