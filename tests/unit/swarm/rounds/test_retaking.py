"""A proven liar's slices are averaged again in the same round, by the members themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.rounds import retaking
from atomtrain.swarm.rounds.auditor import Auditor
from atomtrain.swarm.rounds.audits import Claim
from atomtrain.swarm.rounds.commitments import committed
from atomtrain.swarm.rounds.contributing import Contributions
from atomtrain.swarm.rounds.exchange import Exchange
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.leader_io import LeaderIO
from atomtrain.swarm.rounds.leader_state import LeaderRound
from atomtrain.swarm.rounds.owning import OwnedSlice
from atomtrain.swarm.transport.messages import (
    TAKEN_BACK,
    AskAgain,
    Begin,
    Commit,
    Heard,
    Held,
    Message,
    Ready,
    Seal,
)
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_lying_owners import HONEST, LIAR, Unseen, lied
from tests.unit.swarm.rounds.test_protocol import _call

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def false_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedSlice, "_encode", lied(lambda mean: -mean))


def run(
    wire: str = "float16",
    mean: str = "plain",
    size: int = 0,
    for_s: float = 6.0,
    honest: tuple[str, ...] = HONEST,
) -> Simulation:
    """Have honest peers and a liar average until it is caught, and go on."""
    simulation = Simulation((4000, 900), 0, 0.02, wire=wire, mean=mean, group_size=size)

    async def scenario() -> None:
        for name in (*honest, LIAR):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(for_s)

    run_virtual(scenario)
    for name in honest:
        assert not simulation.peers[name].service.context.roster.trusts(LIAR), "it was not caught"
    assert simulation.check_means() > 3
    return simulation


def shorts(simulation: Simulation) -> list[bool]:
    """Return of each honest peer if a slice was missing in the round in which it saw the lie."""
    return [
        "slices missing" in report.reason
        for name in simulation.peers.keys() - {LIAR}
        for report in simulation.peers[name].reports
        if any(LIAR in why for why in report.rejected)
    ]


def whose(simulation: Simulation) -> set[frozenset[str]]:
    """Return who is in slices without the liar of rounds that have it in others."""
    found = set()
    for _, _, merge in simulation.merges:
        parts = merge.anchor.origin.parts
        if any(LIAR in part.contributors for part in parts):
            found |= {part.contributors for part in parts if LIAR not in part.contributors}
    return found


@pytest.mark.parametrize(
    ("wire", "mean"),
    [*((wire, "plain") for wire in CODEC_NAMES), ("float16", "clipped")],
)
def test_the_round_of_a_lie_lacks_no_slice(wire: str, mean: str) -> None:
    """All honest members have the same bytes of it, the mean of what they contributed."""
    simulation = run(wire, mean)
    assert shorts(simulation) == [False] * len(HONEST)
    assert whose(simulation) == {frozenset(HONEST)}


def test_whom_one_member_leaves_out_counts_where_slices_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would not make the bytes that the others make."""
    begin = Exchange.__init__

    def leaving_out(self: Exchange, setup: ExchangeSetup, what: Begin) -> None:
        out = frozenset({"c"} if setup.peer_id == "a" else ())
        begin(self, replace(setup, excluded=setup.excluded | out), what)

    monkeypatch.setattr(Exchange, "__init__", leaving_out)
    simulation = run()
    assert shorts(simulation) == [False] * len(HONEST)
    assert frozenset(HONEST) in whose(simulation)


def spoilt(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[memoryview]], Any]) -> None:
    """Have member c give others different things when they ask again."""
    own = retaking.Retaking._own

    async def changed(self: retaking.Retaking, index: int) -> tuple[list[memoryview], Seal]:
        pieces, seal = await own(self, index)
        if self._setup.peer_id != "c":
            return pieces, seal
        values = change(pieces)
        return [byte_view(values)], self._auditor.seal(index, committed(values).commitment)

    monkeypatch.setattr(retaking.Retaking, "_own", changed)


def test_who_gives_each_something_else_has_the_slice_stay_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members that do not hold the same bytes commit none: anchors never fork."""
    times = iter(range(1, 10_000))

    def other(pieces: list[memoryview]) -> torch.Tensor:
        return torch.frombuffer(pieces[0], dtype=torch.float32) * (1.0 + 0.01 * next(times))

    spoilt(monkeypatch, other)
    assert shorts(run("float32")) == [True] * len(HONEST)


def test_who_gives_the_others_nothing_has_the_slice_stay_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has all contributions itself, so it does not hold what they do."""
    answer = retaking.Retaking.answer

    async def silent(self: retaking.Retaking, channel: Channel, ask: AskAgain) -> None:
        if self._setup.peer_id == "c":
            raise BadMessage("nothing to say")
        await answer(self, channel, ask)

    monkeypatch.setattr(retaking.Retaking, "answer", silent)
    assert shorts(run()) == [True] * len(HONEST)


def test_a_contribution_that_comes_again_loses_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What encoding loses is kept once, and the bytes are those that went to the liar."""
    encode, first = Contributions.encode, dict[Any, bytes]()
    compared = [0]

    def seen(self: Contributions, piece: Any, index: int, *, again: bool = False) -> Any:
        lost = self._setup.snapshot.lost
        before = None if lost is None else lost.clone()
        made = encode(self, piece, index, again=again)
        key = (id(self), piece)
        if again:
            assert before is not None
            assert lost is not None
            assert torch.equal(before, lost)
            assert first.get(key, bytes(made.data)) == bytes(made.data)
            compared[0] += key in first
        first[key] = bytes(made.data)
        return made

    monkeypatch.setattr(Contributions, "encode", seen)
    run("int4")
    assert compared[0]


SIX = (*HONEST, "d", "e", "f")
"""With a liar they are two groups of three or four."""


def test_rounds_with_bases_lack_no_slice_either() -> None:
    """The base of such a slice is the liar's, which cancels out."""
    found = shorts(run(size=4, for_s=40.0, honest=SIX))
    assert len(found) > 1
    assert not any(found)


def test_who_has_sent_each_another_base_has_the_slice_stay_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members that add the same mean to different bases would be led apart."""
    retake = retaking.Retaking._retake

    async def other(self: retaking.Retaking, liar: int, *rest: Any) -> Any:
        assert self._bases is not None
        for index in self._slices_of(liar):
            self._bases.digests[index] = f"that of {self._setup.peer_id}"
        return await retake(self, liar, *rest)

    monkeypatch.setattr(retaking.Retaking, "_retake", other)
    assert any(shorts(run(size=4, for_s=40.0, honest=SIX)))


def only_one_sees(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all other honest members find nothing in their audits, as where a lie is in a part."""

    claim = Auditor.claim

    def blind(self: Auditor, *what: Any) -> Claim:
        made = claim(self, *what)
        return made if self._setup.peer_id == who else Unseen(**made.__dict__)

    monkeypatch.setattr(Auditor, "claim", blind)


@pytest.mark.parametrize("wire", ["float16", "int4", "topk"])
@pytest.mark.parametrize("who", HONEST)
def test_one_that_sees_the_lie_shows_it_to_the_others_in_the_same_round(
    who: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to the leader, which has seen none; and all of them take the slice again."""
    only_one_sees(who, monkeypatch)
    simulation = run(wire)
    assert shorts(simulation) == [False] * len(HONEST)
    assert whose(simulation) == {frozenset(HONEST)}


def test_a_decision_that_was_made_before_is_about_what_was_held_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it came to the member while this takes back its word: nobody merges other bytes."""
    only_one_sees("a", monkeypatch)
    hear, taken_back = LeaderRound.on_message, list[str]()

    def deaf(self: LeaderRound, member: str, message: Message, now_s: float) -> Any:
        if message != TAKEN_BACK:
            return hear(self, member, message, now_s)
        taken_back.append(member)
        return []

    monkeypatch.setattr(LeaderRound, "on_message", deaf)
    simulation = run(for_s=60.0)
    assert taken_back
    assert any(shorts(simulation))


def test_a_leader_waits_for_nobody_to_whom_it_has_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whom it has caught keeps its stream open, and could keep it from leading the next round."""
    lead, took_s = LeaderIO.run, list[float]()

    async def timed(self: LeaderIO) -> LeaderRound:
        started_s = self._loop.time()
        done = await lead(self)
        took_s.append(self._loop.time() - started_s)
        return done

    monkeypatch.setattr(LeaderIO, "run", timed)
    run(for_s=20.0)
    assert max(took_s) < 3.0


@pytest.mark.parametrize("owner", [LIAR, "b", "nobody"])
def test_nobody_is_told_twice_or_of_an_owner_that_has_not_lied(owner: str) -> None:
    """A proof of another's lie, of which there is one, shows nothing."""
    simulation = Simulation((4000,), 0)
    asked: list[str] = []
    run_again = retaking.Retaking.run

    async def shown(self: retaking.Retaking, channel: Channel) -> None:
        await channel.receive(Heard, 5.0)
        proven = self._auditor.proof_of(LIAR)
        await channel.send(proven.proof)
        await channel.send_bytes(proven.data)
        await channel.receive(AskAgain, 5.0)

    async def asking(self: retaking.Retaking, *rest: Any) -> Any:
        found = await run_again(self, *rest)
        if self._setup.peer_id == "a" and self._auditor.lied:
            place = [*self._begin.members, "nobody"].index(owner)
            channel = await self._setup.open("c")
            await channel.send(AskAgain(round_id=self._begin.round_id, owner=place))
            with pytest.raises(Exception, match=r".") as refused:
                await shown(self, channel)
            asked.append(type(refused.value).__name__)
            channel.close()
        return found

    async def scenario() -> None:
        for name in (*HONEST, LIAR):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(6.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retaking.Retaking, "run", asking)
        run_virtual(scenario)
    assert asked
    assert set(asked) == {"LinkLost"}
    assert simulation.peers["c"].service.context.roster.trusts("b")


def exchanging(members: tuple[str, ...]) -> tuple[LeaderRound, int]:
    """Return a round whose members exchange slices, and how many of these there are."""
    call = _call()
    leader = LeaderRound(call, list(members), now_s=0.0)
    leader.start()
    ready = Ready(version=0, tokens=0, digest="d", weight=10, late=False)
    for member in members:
        leader.on_message(member, ready, 0.0)
    return leader, len(members) * call.slices_each(len(members))


def test_the_leader_waits_for_who_takes_back_what_it_said() -> None:
    leader, slices = exchanging(("m0", "m1"))
    old, new = (Held(digests=(text,) * slices) for text in ("old", "new"))
    assert leader.on_message("m0", old, 0.0) == []
    assert leader.on_message("m0", TAKEN_BACK, 0.0) == [("m0", TAKEN_BACK)]
    assert leader.on_message("m1", new, 0.0) == []
    told = leader.on_message("m0", new, 0.0)
    commit = Commit(slices=tuple(range(slices)), absent=())
    assert told == [("m0", commit), ("m1", commit)]
    assert leader.on_message("m0", TAKEN_BACK, 0.0) == [], "it is decided"


def test_the_leader_waits_for_nobody_beyond_the_deadline() -> None:
    leader, slices = exchanging(("m0", "m1", "m2"))
    held = Held(digests=("same",) * slices)
    for member in ("m0", "m1"):
        leader.on_message(member, held, 0.0)
    leader.on_message("m1", TAKEN_BACK, 0.0)
    leader.on_message("m2", held, 0.0)
    told = dict(leader.on_tick(leader.deadline_s))
    assert set(told) == {"m0", "m2"}


@pytest.mark.parametrize("trusted", [False, True])
def test_whom_the_leader_has_caught_does_not_keep_the_others_from_a_slice(trusted: bool) -> None:
    call = replace(_call(), trusted=lambda member: trusted or member != "m2")
    leader = LeaderRound(call, ["m0", "m1", "m2"], now_s=0.0)
    leader.start()
    ready = Ready(version=0, tokens=0, digest="d", weight=10, late=False)
    out: list[Any] = []
    for member in ("m0", "m1", "m2"):
        out = leader.on_message(member, ready, 0.0)
    assert {type(message) for _, message in out} == {Begin}
    slices = 3 * call.slices_each(3)
    for member in ("m2", "m0", "m1"):
        digests = ["same"] * slices
        digests[-1] = "false" if member == "m2" else "taken again"
        out = leader.on_message(member, Held(digests=tuple(digests)), 0.0)
    told = dict(out)
    most = range(slices - 1) if trusted else range(slices)
    assert set(told) == ({"m0", "m1", "m2"} if trusted else {"m0", "m1"})
    assert all(
        one == Commit(slices=tuple(most), absent=() if trusted else ("m2",))
        for one in told.values()
    )
