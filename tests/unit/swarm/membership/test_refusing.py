"""What follows from an anchor that did harm: who claims it, leads with it or gives it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import RunAge, Stamp
from atomtrain.swarm.anchors.trial import Refusal
from atomtrain.swarm.membership import roster as roster_module
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.rounds.leader_state import LeaderRound, RoundCall
from atomtrain.swarm.transport.messages import Begin, Invite, Ready
from tests.support.swarm_virtual import SimulatedPeer, Simulation
from tests.unit.swarm.membership.test_claims import forged, lie, quiet
from tests.unit.swarm.membership.test_membership import ALICE, MALLORY, record_of

BORN_S = 1e9
HARM = Stamp(5, 900, "ba" * 16)


class Clock:
    now_s = BORN_S

    def __call__(self) -> float:
        return self.now_s


def known(clock: Clock) -> Roster:
    """Return a roster of Alice, and of Mallory who has more."""
    roster = Roster(Admission("run", "me"), 2, "m", age=RunAge(BORN_S, clock))
    roster.update(records(HARM))
    return roster


def records(stamp: Stamp, sequence: float = 1.0) -> dict[str, bytes]:
    lying = replace(record_of(MALLORY, sequence), stamps=(stamp, None))
    return {
        ALICE.peer_id: record_of(ALICE, sequence).encode(),
        MALLORY.peer_id: lying.encode(),
    }


def test_who_claims_a_refused_anchor_counts_as_gone_as_long_as_it_does() -> None:
    roster = known(Clock())
    assert roster.best()[0] == HARM
    roster.refuse(HARM.digest)
    assert roster.best() == list(record_of(ALICE).stamps)
    assert [holder.peer_id for holder in roster.holders(0)] == [ALICE.peer_id]
    assert MALLORY.peer_id not in {record.peer_id for record in roster.training()}
    assert not roster.trusts(MALLORY.peer_id)
    roster.update(records(HARM, 2.0))
    assert not roster.trusts(MALLORY.peer_id)
    roster.update(records(replace(HARM, digest="cd" * 16), 3.0))
    assert roster.trusts(MALLORY.peer_id)


def test_what_a_round_has_made_is_refused_for_a_moment() -> None:
    clock = Clock()
    roster = known(clock)
    roster.refuse(HARM.digest, 5.0)
    clock.now_s += 4.9
    roster.update(records(HARM, 2.0))
    assert not roster.trusts(MALLORY.peer_id)
    clock.now_s += 0.2
    roster.update(records(HARM, 3.0))
    assert roster.trusts(MALLORY.peer_id)
    assert not roster.refused


def test_who_gave_it_is_asked_again_later_and_later() -> None:
    clock = Clock()
    roster = known(clock)
    for for_s in (5.0, 10.0, 20.0):
        roster.bar(MALLORY.peer_id)
        clock.now_s += 0.9 * for_s
        assert not roster.trusts(MALLORY.peer_id)
        clock.now_s += 0.2 * for_s
        assert roster.trusts(MALLORY.peer_id)
    for _ in range(40):
        roster.bar(MALLORY.peer_id)
    clock.now_s += 86401.0
    assert roster.trusts(MALLORY.peer_id), "but not never"


def test_as_many_refusals_are_remembered_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "_REFUSED_MAX", 3)
    roster = known(Clock())
    for digest in ("a", "b", "c", "a", "d"):
        roster.refuse(digest)
    assert sorted(roster.refused) == ["a", "c", "d"]


def test_a_leader_averages_without_who_is_on_a_refused_anchor() -> None:
    call = RoundCall(
        round_id="7-a-1", round_index=7, fragment=0, version=4, answer_s=1.0,
        exchange_s=lambda *_: 1.0, slices_each=lambda _: 1, decision_s=1.0, refused={HARM.digest},
    )  # fmt: skip
    leader = LeaderRound(call, ["a", "b", "liar"], 0.0)
    leader.start()
    better = Ready(version=5, tokens=900, digest=HARM.digest, weight=10, late=False)
    own = Ready(version=4, tokens=800, digest="d", weight=10, late=False)
    leader.on_message("liar", better, 0.1)
    leader.on_message("a", own, 0.1)
    told = dict(leader.on_message("b", own, 0.1))
    assert leader.group == ("a", "b")
    assert all(isinstance(message, Begin) for message in told.values())


def test_nobody_follows_fetches_or_asks_for_what_did_harm() -> None:
    async def scenario() -> None:
        simulation = await quiet("a", "b", "liar")
        for peer in simulation.peers.values():  # nothing is fetched by itself
            peer.service._repairer.stale = lambda: None  # type: ignore[method-assign]
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=10))
        await asyncio.sleep(3)
        a = simulation.peers["a"]
        told = simulation.peers["liar"].service.context.mailbox.store.anchor(0).stamp
        invite = Invite(
            round_id="7-liar-1", round_index=7, fragment=0, version=1, slack=0, answer_s=1.0
        )
        assert not await a.service._rounds._stranger("liar", invite)
        a.service.on_refusal(Refusal(0, told, ""))
        assert "did harm here" in await a.service._rounds._stranger("liar", invite)
        assert a.service.context.group(7) != ["liar"]
        assert "liar" not in a.service.context.group(7)
        with pytest.raises(BadMessage, match="done harm here"):
            await a.service._repairer.fetcher.fetch_from("liar", 0)

    run_virtual(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_that_undoes_what_its_rounds_made_comes_back_to_the_others(seed: int) -> None:
    """Two that see nobody else wait for it with what it undid, which stays what they have."""

    async def scenario() -> None:
        simulation = Simulation((5, 9, 12), seed, local_steps_per_round=3)
        network, was = simulation.network, simulation.network.connected
        network.connected = (  # type: ignore[method-assign]
            lambda one, other: {one, other} != {"b", "c"} and was(one, other)
        )
        a, *_ = [await simulation.add(name, step_s=0.3) for name in "abc"]
        await asyncio.sleep(20)
        losses = [1.0, 2.0] * 6
        judge = lambda: losses.pop(0) if losses else 1.0  # noqa: E731
        a.service.context.mailbox.use_judge(judge, lambda: 0.0)
        while losses:
            await asyncio.sleep(0.1)
        assert "refused" in {report.outcome for report in a.reports}
        told = len(a.reports)
        await asyncio.sleep(30)
        met = {peer for report in a.reports[told:] for peer in report.contributors}
        assert met == {"a", "b", "c"}
        assert await simulation.settle(120)

    run_virtual(scenario)


def test_a_plausible_anchor_is_tried_once_and_nobody_is_worse_for_it() -> None:
    async def scenario() -> None:
        simulation = await quiet("a", "b", "liar", outer_momentum=0.5)
        honest = [simulation.peers[name] for name in ("a", "b")]
        for peer in honest:
            _judges(peer)
        harm = torch.full((300,), 3.0)
        lie(simulation.peers["liar"], lambda anchor: forged(anchor, tokens=10, values=harm))
        await asyncio.sleep(30)
        for peer in honest:
            assert [report.outcome for report in peer.reports] == ["refused"]
            assert not peer.fragments[0].any()
            assert peer.service.context.mailbox.store.anchor(0).stamp.version == 0
            assert not peer.service.context.roster.trusts("liar")

    run_virtual(scenario)


def test_a_good_anchor_is_taken() -> None:
    """So that the test above fails where nothing at all is."""

    async def scenario() -> None:
        simulation = await quiet("a", "ahead")
        _judges(simulation.peers["a"])
        good = torch.full((300,), 0.01)
        lie(simulation.peers["ahead"], lambda anchor: forged(anchor, tokens=10, values=good))
        await asyncio.sleep(20)
        assert torch.equal(simulation.peers["a"].fragments[0], good)
        assert [report.outcome for report in simulation.peers["a"].reports] == ["fetched"]

    run_virtual(scenario)


def _judges(peer: SimulatedPeer) -> None:
    mailbox = peer.service.context.mailbox
    mailbox.use_judge(lambda: 1.0 + float(peer.fragments[0].abs().mean()), lambda: 0.0)
