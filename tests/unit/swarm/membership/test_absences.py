"""Who is invited and takes no part is left out for a while, and comes back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership import absences
from atomtrain.swarm.membership.absences import Absences
from atomtrain.swarm.rounds.leader_state import LeaderRound
from atomtrain.swarm.rounds.round_member import RoundMember
from atomtrain.swarm.transport.messages import Begin, Commit, Held, Invite, Propose, Proposed, Ready
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_protocol import _call

MOST = 16
"""Rounds that nobody is left out for longer."""


def test_the_second_absence_in_a_row_costs_a_round_and_each_more_twice_as_many() -> None:
    known, round_index, left_out = Absences(), 0, []
    for _ in range(8):
        known.observe(round_index, present=["b"], absent=["ghost"])
        round_index += 1
        begun = round_index
        while known.left_out("ghost", round_index):
            round_index += 1
        left_out.append(round_index - begun)
    assert left_out == [0, 1, 2, 4, 8, MOST, MOST, MOST]
    assert not known.left_out("b", round_index)


def test_one_round_forgives_all_and_no_round_counts_twice() -> None:
    known = Absences()
    for _ in range(3):
        known.observe(5, present=[], absent=["slow"])
    assert not known.left_out("slow", 6), "one round"
    known.observe(6, present=[], absent=["slow"])
    assert known.left_out("slow", 7)
    known.observe(6, present=["slow"], absent=[])
    known.observe(7, present=[], absent=["slow"])
    assert not known.left_out("slow", 8)


def test_a_leader_invites_all_where_nobody_else_would_be_left() -> None:
    known = Absences()
    for round_index in (1, 2):
        known.observe(round_index, present=[], absent=["b", "c"])
    assert known.invited("a", ["a", "b", "c", "d"], 3) == {"a", "d"}
    assert known.invited("a", ["a", "b", "c"], 3) == {"a", "b", "c"}


def test_as_many_are_remembered_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absences, "_PEERS_MAX", 3)
    known = Absences()
    known.observe(1, present=[], absent=[f"p{number}" for number in range(100)])
    assert len(known._absent) == 3


def test_a_decision_names_who_took_no_part() -> None:
    leader = LeaderRound(_call(), ["a", "b", "dumb", "gone", "held back"], 0.0)
    leader.start()
    ready = Ready(version=1, tokens=7, digest="x", weight=1, late=False)
    for member in ("a", "b", "held back"):
        leader.on_message(member, ready, 0.1)
    leader.on_lost("gone", 0.2)
    assert [type(message) for _, message in leader.on_tick(10.0)] == [Begin] * 3
    slices = 3 * leader.call.slices_each(3)
    for member in ("a", "b"):
        leader.on_message(member, Held(digests=("h",) * slices), 11.0)
    told = leader.on_tick(1000.0)
    absent = ("dumb", "gone", "held back")
    assert told == [(m, Commit(slices=tuple(range(slices)), absent=absent)) for m in ("a", "b")]


def test_without_a_decision_only_who_said_nothing_was_absent() -> None:
    leader = LeaderRound(_call(), ["a", "dumb", "gone"], 0.0)
    leader.start()
    leader.on_message("a", Ready(version=1, tokens=7, digest="x", weight=1, late=False), 0.1)
    leader.on_lost("gone", 0.2)
    leader.on_tick(10.0)
    assert leader.absent == {"dumb"}


def test_a_leaders_word_counts_of_its_own_group_only() -> None:
    known = Absences()
    context = SimpleNamespace(
        peer_id="me", absences=known, group=lambda _: ["leader", "me", "came", "ghost"]
    )
    for round_index in (1, 2):
        member: Any = SimpleNamespace(
            _channel=SimpleNamespace(remote="leader"), _context=context,
            invite=SimpleNamespace(round_index=round_index),
        )  # fmt: skip
        begin: Any = SimpleNamespace(members=("leader", "me", "came"))
        named = ("leader", "me", "ghost", "of another group")
        RoundMember._count_absent(member, begin, Commit(slices=(0,), absent=named))
    counted = [p for p in (*named, "came") if known.left_out(p, 3)]
    assert counted == ["ghost"]


@pytest.mark.slow
def test_a_ghost_is_hardly_invited_and_comes_back() -> None:
    """It accepts what it is told, and opens streams, but does nothing on them."""

    async def scenario() -> None:
        simulation = Simulation((60, 30), 5, 0.02)
        for name in ("a", "b", "c", "ghost"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        ghost, a = simulation.peers["ghost"], simulation.peers["a"]
        rounds, invited = ghost.service._rounds, []

        async def follow(channel: Channel, invite: Invite) -> bool:
            invited.append(invite.round_index)
            await asyncio.sleep(1e6)
            return False

        async def consider(proposer: str, message: Propose) -> Proposed:
            return Proposed(accepted=True, round_index=message.round_index, reason="")

        false: dict[str, Any] = {"follow": follow, "consider": consider}
        for name, instead in false.items():
            setattr(rounds, name, instead)
        ghost.training = rounds.active = False
        seen = len(a.reports)
        await asyncio.sleep(120)
        rounds.active = True
        since = [report for report in a.reports[seen:] if report.outcome != "abandoned"]
        assert len(since) > 20
        assert len(invited) <= 5 + len(since) / MOST, (invited, len(since))
        for name in false:
            delattr(rounds, name)
        ghost.training = True
        begun = a.service.context.agenda.next_round
        while not any("ghost" in r.contributors and r.round >= begun for r in a.reports):
            await asyncio.sleep(1)
        assert a.service.context.agenda.next_round - begun <= MOST + 2

    run_virtual(scenario)
