"""What peers make of claims: no anchor beyond what a run of its age can have, none not finite."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.anchors import Anchor, digest_of
from atomtrain.swarm.anchors.stamps import TOKENS_MAX, VERSION_MAX, Limit, RunAge, Stamp, best_of
from atomtrain.swarm.anchors.updates import AdamWUpdate
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.config import Manifest
from atomtrain.swarm.membership.records import PeerRecord
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.rounds.leader_state import LeaderRound, RoundCall
from atomtrain.swarm.rounds.round_member import check_begin
from atomtrain.swarm.transport.messages import AskAnchor, Begin, Invite, Ready
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import SimulatedPeer, Simulation
from tests.unit.swarm.membership.test_membership import ALICE, MALLORY, record_of

BORN_S = 1e9
DAY_S = 86400.0


def limit_at(age_s: float, born_s: float = BORN_S) -> Limit:
    return RunAge(born_s, lambda: BORN_S + age_s).limit


# What there can be


@pytest.mark.parametrize("age_s", [0.0, 60.0, 10 * DAY_S])
def test_no_honest_swarm_is_refused(age_s: float) -> None:
    """Not five hundred machines with a million tokens a second, nor one with a step a second."""
    most = Stamp(int(100 * age_s), int(500 * 10**6 * age_s), "")
    assert not limit_at(age_s).refusal(most)


def test_what_a_peer_missed_is_no_part_of_it() -> None:
    """A half that was cut off for a day, or a machine that slept, believes what the others did."""
    others = Stamp(10**6, 10**12, "a")
    assert not limit_at(DAY_S).refusal(others)
    assert others.beats(Stamp(12, 34_000, "b"))


def test_claims_beyond_the_age_are_refused() -> None:
    assert "tokens" in limit_at(60.0).refusal(Stamp(1, 2**49, ""))
    assert "version" in limit_at(60.0).refusal(Stamp(2**39, 1, ""))
    assert not limit_at(10 * DAY_S).refusal(Stamp(1, 2**49, "")), "by then it might be"


@pytest.mark.parametrize("born_s", [0.0, BORN_S])
def test_no_age_admits_numbers_that_run_out(born_s: float) -> None:
    limit = limit_at(1e6 * DAY_S, born_s)
    assert limit == Limit(VERSION_MAX, TOKENS_MAX)
    assert limit.refusal(Stamp(0, TOKENS_MAX + 1, ""))
    assert limit.refusal(Stamp(VERSION_MAX + 1, 0, ""))


def test_a_clock_that_is_behind_the_runs_beginning_is_as_at_the_beginning() -> None:
    assert limit_at(-DAY_S) == limit_at(0.0)


def test_counts_stay_where_they_cannot_grow() -> None:
    full = Stamp(VERSION_MAX, TOKENS_MAX, "a").next(2**53, "b")
    assert full == Stamp(VERSION_MAX, TOKENS_MAX, "b")
    late = Stamp(7, TOKENS_MAX, "a")
    assert late.next(5).beats(late), "the version goes on to tell"
    assert best_of((None, late, late.next(1), None)) == late.next(1)
    assert best_of((None,)) is None


@pytest.mark.parametrize("born_s", [-1.0, float("nan"), float("inf"), True, "soon", None])
def test_a_manifest_without_a_time_is_refused(born_s: object) -> None:
    manifest = Manifest("run", (3,), born_s=BORN_S)
    assert Manifest.decode(manifest.encode()).born_s == BORN_S
    body = {**json.loads(manifest.encode()), "born_s": born_s}
    with pytest.raises(SwarmError, match="manifest"):
        Manifest.decode(json.dumps(body).encode())


# Records


def roster_at(age_s: float) -> Roster:
    age = RunAge(BORN_S, lambda: BORN_S + age_s)
    return Roster(Admission("run", "me"), 2, "m", age=age)


def records(stamp: Stamp, sequence: float = 1.0) -> dict[str, bytes]:
    """Return those of an honest peer, and of one that claims this of its first fragment."""
    lying = record_of(MALLORY, sequence, stamps=(stamp, None))
    return {
        ALICE.peer_id: record_of(ALICE, sequence).encode(),
        MALLORY.peer_id: replace(lying, next_round=10**6).encode(),
    }


@pytest.mark.parametrize("claim", [Stamp(2, 2**49, "ab" * 16), Stamp(2**39, 3, "ab" * 16)])
def test_who_claims_what_cannot_be_counts_as_gone(
    claim: Stamp, caplog: pytest.LogCaptureFixture
) -> None:
    roster = roster_at(60.0)
    for sequence in (1.0, 2.0, 3.0):
        with caplog.at_level(logging.WARNING):
            roster.update(records(claim, sequence))
    honest = record_of(ALICE).stamps
    assert roster.best() == list(honest)
    assert [holder.peer_id for holder in roster.holders(0)] == [ALICE.peer_id]
    assert [record.peer_id for record in roster.others] == [ALICE.peer_id]
    assert roster.next_round() < 10**6
    assert len(caplog.messages) == 1, "it is told once"
    assert MALLORY.peer_id[-8:] in caplog.messages[0]

    roster.update(records(Stamp(2, 3, "ab" * 16), 4.0))
    assert len(roster.others) == 2, "a claim that can be true counts again"


def test_who_gave_what_cannot_be_taken_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    roster = roster_at(60.0)
    fine = Stamp(5, 1000, "ab" * 16)
    roster.update(records(fine))
    assert roster.best()[0] == fine
    with caplog.at_level(logging.WARNING):
        for sequence in (2.0, 3.0):
            roster.distrust(MALLORY.peer_id, "NaN")
            roster.update(records(fine, sequence))
    assert [record.peer_id for record in roster.others] == [ALICE.peer_id]
    assert len(caplog.messages) == 1


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    roster = roster_at(60.0)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            roster.distrust(f"peer{number}", "NaN")
    assert len(caplog.messages) == 64


@pytest.mark.parametrize("key", ["tokens", "steps", "next_round"])
def test_counts_in_records_are_whole_numbers(key: str) -> None:
    body = json.loads(record_of(ALICE).encode())
    assert PeerRecord.decode(ALICE.peer_id, json.dumps(body).encode(), 2)
    for wrong in (1.5, -1, 2**53, True, float("nan")):
        with pytest.raises(BadMessage):
            PeerRecord.decode(ALICE.peer_id, json.dumps({**body, key: wrong}).encode(), 2)


def test_a_newcomer_prefers_what_several_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four claims more than the others, within what can be."""
    asked: list[str] = []
    send = Channel.send

    async def noted(self: Channel, message: Any) -> None:
        if isinstance(message, AskAnchor):
            asked.append(self.remote)
        await send(self, message)

    async def scenario() -> None:
        simulation = await quiet("a", "b", "c", "liar")
        for peer in simulation.peers.values():  # who is there already does not take it so soon
            peer.service._repairer.stale = lambda: None  # type: ignore[method-assign]
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=10**6))
        await asyncio.sleep(3)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        best = late.service.context.roster.best()
        assert best[0] is not None
        assert best[0].tokens > 10**5, "the claim is there"
        monkeypatch.setattr(Channel, "send", noted)
        await late.service.fetch(0, 10.0)
        assert asked
        assert asked[0] != "liar"
        await late.stop_abruptly()

    run_virtual(scenario)


# Rounds


def ready(tokens: int, weight: int = 10) -> Ready:
    return Ready(version=3, tokens=tokens, digest="d", weight=weight, late=False)


@pytest.mark.parametrize("lying", [ready(2**49), ready(100, weight=2**49)])
def test_a_leader_goes_on_without_who_is_ready_on_what_cannot_be(lying: Ready) -> None:
    call = RoundCall(
        round_id="7-a-1", round_index=7, fragment=0, version=3, answer_s=1.0,
        exchange_s=lambda *_: 1.0, slices_each=lambda _: 1, decision_s=1.0, limit=limit_at(60.0),
    )  # fmt: skip
    leader = LeaderRound(call, ["a", "b", "liar"], 0.0)
    leader.start()
    leader.on_message("liar", lying, 0.1)
    leader.on_message("a", ready(100), 0.1)
    told = dict(leader.on_message("b", ready(100), 0.1))
    assert leader.group == ("a", "b")
    assert all(isinstance(message, Begin) for message in told.values())


def test_a_member_enters_no_round_that_makes_what_cannot_be() -> None:
    async def scenario() -> None:
        context = (await quiet("a", "b")).peers["a"].service.context
        own = Stamp(3, 100, "d")
        begin = Begin(
            round_id="7-a-1", members=("a", "b"), weights=(10, 10), late=(False, False),
            exchange_s=2.0, bases=False, version=3, tokens=100, groups=1,
        )  # fmt: skip
        check_begin(begin, own, context)
        with pytest.raises(BadMessage, match="tokens"):
            check_begin(structs.replace(begin, weights=(10, 2**49)), own, context)

    run_virtual(scenario)


def test_nobody_follows_a_leader_that_claims_what_cannot_be() -> None:
    async def scenario() -> None:
        rounds = (await quiet("a", "b")).peers["a"].service._rounds
        invite = Invite(
            round_id="7-b-1", round_index=7, fragment=0, version=3, slack=0, answer_s=1.0
        )
        assert not await rounds._stranger("b", invite)
        assert "cannot be true" in await rounds._stranger(
            "b", structs.replace(invite, version=2**39)
        )
        rounds._context.roster.distrust("b", "NaN")
        assert "cannot be true" in await rounds._stranger("b", invite)

    run_virtual(scenario)


# Anchors that are given


async def quiet(*names: str, **rules: Any) -> Simulation:
    """Return a swarm that has learnt nothing, and whose next round is far away."""
    simulation = Simulation((300,), seed=5, local_steps_per_round=100_000, **rules)
    for name in names:
        await simulation.add(name, step_s=0.5, step=lambda _: None)
    return simulation


def forged(anchor: Anchor, *, tokens: int, **changes: Any) -> Anchor:
    """Return an anchor of a version and tokens more, with a hash that is right."""
    new = replace(anchor, **changes)
    digest = digest_of(new.values, new.velocity)
    return replace(new, stamp=Stamp(anchor.stamp.version + 1, anchor.stamp.tokens + tokens, digest))


def lie(peer: SimulatedPeer, forge: Callable[[Anchor], Anchor]) -> None:
    """Have a peer tell of other anchors than it has, and give them."""
    store = peer.service.context.mailbox.store
    anchor = store.anchor
    store.anchor = lambda fragment: forge(anchor(fragment))  # type: ignore[method-assign]
    store.stamps = lambda: (store.anchor(0).stamp,)  # type: ignore[method-assign]


def with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[-1] = value
    return changed


WRONG = [float("nan"), float("inf"), -float("inf"), 1e30]
"""The last one is finite, and its square is not."""


@pytest.mark.parametrize("part", ["values", "velocity"])
@pytest.mark.parametrize("value", WRONG)
def test_what_is_not_finite_is_not_taken(part: str, value: float) -> None:
    """By a member that is behind: neither parameters nor velocity; its donor counts as gone."""

    async def scenario() -> None:
        simulation = await quiet("a", "b", "liar", outer_momentum=0.5)
        lie(
            simulation.peers["liar"],
            lambda anchor: forged(
                anchor, tokens=10, **{part: with_one(getattr(anchor, part), value)}
            ),
        )
        await asyncio.sleep(20)
        for name in ("a", "b"):
            peer = simulation.peers[name]
            anchor = peer.service.context.mailbox.store.anchor(0)
            assert anchor.stamp.version == 0
            assert not peer.reports
            assert not peer.service.context.roster.trusts("liar")

    run_virtual(scenario)


def test_what_is_finite_is_taken() -> None:
    """So that the test above fails where nothing at all is fetched."""

    async def scenario() -> None:
        simulation = await quiet("a", "b", "ahead", outer_momentum=0.5)
        ones = torch.ones(300)
        lie(simulation.peers["ahead"], lambda anchor: forged(anchor, tokens=10, values=ones))
        await asyncio.sleep(20)
        for name in ("a", "b"):
            assert torch.equal(simulation.peers[name].fragments[0], ones)

    run_virtual(scenario)


def test_an_anchor_is_not_fetched_whose_header_cannot_be() -> None:
    """The record was plausible; what the donor then sends says more."""

    async def scenario() -> None:
        simulation = await quiet("a", "liar")
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=2**49))
        store = simulation.peers["liar"].service.context.mailbox.store
        store.stamps = lambda: (Stamp(1, 10, "ab" * 16),)  # type: ignore[method-assign]
        await asyncio.sleep(3)
        fetcher = simulation.peers["a"].service._repairer.fetcher
        with pytest.raises(BadMessage, match="tokens"):
            await fetcher.fetch_from("liar", 0)

    run_virtual(scenario)


def test_a_newcomer_takes_another_donor_or_says_why_not() -> None:
    async def scenario() -> None:
        simulation = await quiet("a", "liar")
        wrong = torch.full((300,), float("nan"))
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=10, values=wrong))
        await asyncio.sleep(3)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        anchor = await late.service.fetch(0, 10.0)
        assert bool(torch.isfinite(anchor.values).all())
        await late.stop_abruptly()

        await simulation.kill("a")
        await asyncio.sleep(10)  # longer than its record lives
        last = SimulatedPeer(simulation, "last", 0.5)
        await last.service.start()
        with pytest.raises(SwarmError, match="has values that are not finite") as caught:
            await last.service.fetch(0, 10.0)
        assert "\n" not in str(caught.value)
        await last.stop_abruptly()

    run_virtual(scenario)


def test_a_groups_anchor_is_not_taken_in_a_run_without_groups() -> None:
    async def scenario() -> None:
        simulation = await quiet("a", "liar", outer_momentum=0.5)
        lie(
            simulation.peers["liar"],
            lambda anchor: forged(anchor, tokens=10, velocity=None, grouped=True),
        )
        await asyncio.sleep(20)
        assert simulation.peers["a"].service.context.mailbox.store.anchor(0).stamp.version == 0

    run_virtual(scenario)


def test_second_moments_are_not_negative() -> None:
    update = AdamWUpdate(learning_rate_at=lambda _: 0.1, decayed=[()])
    assert update.admits(torch.tensor([-1.0, 2.0, 0.0, 3.0]))
    assert not update.admits(torch.tensor([1.0, 2.0, 0.0, -3.0]))


def test_a_peer_alone_keeps_its_anchor_when_it_learns_nonsense() -> None:
    def learn_nonsense(peer: SimulatedPeer) -> None:
        peer.fragments[0].fill_(float("nan"))

    async def scenario() -> None:
        simulation = Simulation((30,), seed=6)
        peer = await simulation.add("a", step_s=0.5, step=lambda p: p.fragments[0].add_(1.0))
        await asyncio.sleep(10)
        peer._step = learn_nonsense
        await asyncio.sleep(10)
        anchor = peer.service.context.mailbox.store.anchor(0)
        assert bool(torch.isfinite(anchor.values).all())
        assert anchor.stamp.version > 0
        assert peer.reports[-1].outcome == "abandoned"
        assert "not finite" in peer.reports[-1].reason

    run_virtual(scenario)
