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
from atomtrain.swarm.rounds.commitments import committed
from atomtrain.swarm.rounds.contributing import Contributions
from atomtrain.swarm.rounds.exchange import Exchange
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.leader_state import LeaderRound
from atomtrain.swarm.rounds.owning import OwnedSlice
from atomtrain.swarm.transport.messages import AskAgain, Begin, Commit, Held, Ready, Seal
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import Simulation
from tests.unit.swarm.rounds.test_lying_owners import HONEST, LIAR, lied
from tests.unit.swarm.rounds.test_protocol import _call

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def false_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnedSlice, "_encode", lied(lambda mean: -mean))


def run(
    wire: str = "float16", mean: str = "plain", size: int = 0, for_s: float = 6.0
) -> Simulation:
    """Have three honest peers and a liar average until it is caught, and go on."""
    simulation = Simulation((4000, 900), 0, 0.02, wire=wire, mean=mean, group_size=size)

    async def scenario() -> None:
        for name in (*HONEST, LIAR):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(for_s)

    run_virtual(scenario)
    for name in HONEST:
        assert not simulation.peers[name].service.context.roster.trusts(LIAR), "it was not caught"
    assert simulation.check_means() > 3
    return simulation


def shorts(simulation: Simulation) -> list[bool]:
    """Return of each honest peer if a slice was missing in the round in which it saw the lie."""
    return [
        "slices missing" in report.reason
        for name in HONEST
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
        return [byte_view(values)], self._seal(index, committed(values).commitment)

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


def test_in_rounds_with_bases_the_slice_waits_for_the_next() -> None:
    simulation = run(size=3, for_s=40.0)
    assert any(shorts(simulation))


@pytest.mark.parametrize("caught", [False, True])
def test_nobody_is_told_twice_or_of_an_owner_that_has_not_lied(caught: bool) -> None:
    simulation = Simulation((4000,), 0)
    asked: list[str] = []
    run_again = retaking.Retaking.run

    async def asking(self: retaking.Retaking, lied: Any, *rest: Any) -> Any:
        found = await run_again(self, lied, *rest)
        if self._setup.peer_id == "a":
            b = self._begin.members.index("b")
            owner = self._begin.members.index(LIAR) if caught and lied else b
            ask = AskAgain(round_id=self._begin.round_id, owner=owner)
            channel = await self._setup.open("c")
            await channel.send(ask)
            with pytest.raises(Exception, match=r".") as refused:
                await channel.receive(AskAgain, 5.0)
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
