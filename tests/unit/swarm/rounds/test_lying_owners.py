"""Members that lie in rounds: what they send is not taken, and who is proved to lie is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.node import accusing
from atomtrain.swarm.rounds import auditor, contributing, exchange, round_member
from atomtrain.swarm.rounds.audits import Claim
from atomtrain.swarm.rounds.commitments import Commitment, committed
from atomtrain.swarm.rounds.owning import OwnedSlice
from atomtrain.swarm.rounds.proofs import Judged, judge_proof
from atomtrain.swarm.transport.messages import Contribution, Evidence, Held, Mean, Message, Seal
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import Simulation

pytestmark = pytest.mark.slow
HONEST, LIAR = ("a", "b", "c"), "liar"
LONG = "its mean is longer than what it is the mean of"


def owner_of(owned: OwnedSlice) -> str:
    """Return who owns a slice; small fragments have one for each member."""
    return owned._begin.members[owned._index]


def lied(lie: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Have slices of the liar go out with another mean than they have."""
    encode = OwnedSlice._encode

    def false(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        return encode(self, contributors, lie(mean) if owner_of(self) == LIAR else mean)

    return false


class Unseen(Claim):
    """A mean in which an audit finds nothing, as where no more than a part of it is false."""

    def impossible(self) -> str:
        return ""

    def wrong(self, *_: Any) -> str:
        return ""


def run(seconds_s: float = 60.0, wire: str = "float16", **rules: Any) -> Simulation:
    """Have three honest peers and one more average; return what became of them."""
    simulation = Simulation((4000, 900), 5, 0.02, wire=wire, mean="plain", **rules)

    async def scenario() -> None:
        for name in (*HONEST, LIAR):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(seconds_s)

    run_virtual(scenario)
    return simulation


def trusted(simulation: Simulation) -> dict[str, set[str]]:
    """Return whom each peer trusts, of the others."""
    return {
        name: {o for o in simulation.peers if o != name and peer.service.context.roster.trusts(o)}
        for name, peer in simulation.peers.items()
    }


@pytest.mark.parametrize("wire", ["float32", "float16", "int8", "int4", "topk"])
def test_honest_members_trust_each_other(wire: str) -> None:
    simulation = run(wire=wire)
    assert trusted(simulation) == {n: {*HONEST, LIAR} - {n} for n in (*HONEST, LIAR)}
    assert simulation.check_means() > 20
    reports = [report for peer in simulation.peers.values() for report in peer.reports]
    assert not [report.rejected for report in reports if report.rejected]


@pytest.mark.parametrize("factor", [-5.0, -1.0, 0.98])
def test_who_returns_another_mean_is_left_out_from_its_first_round_on(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnedSlice, "_encode", lied(lambda mean: mean.mul(factor)))
    simulation = run()
    for name in HONEST:
        assert trusted(simulation)[name] == {*HONEST} - {name}
    assert simulation.check_means() > 20, "no wrong mean was merged"
    for name in HONEST:
        said = [why for report in simulation.peers[name].reports for why in report.rejected]
        assert [why for why in said if LIAR in why], said
        assert not [why for why in said if LIAR not in why], said
        last = simulation.peers[name].reports[-6:]
        assert all(set(report.contributors) == {*HONEST} for report in last)


def larger(commitments: tuple[str, ...], times: float = 5) -> tuple[str, ...]:
    """Return commitments to contributions that are so many times as large."""
    read = [Commitment.read(text) for text in commitments]
    return tuple(Commitment(one.root, times * one.norm).text for one in read if one is not None)


def test_a_mean_that_is_too_long_is_found_in_any_slice_and_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing but one number is wrong, which hardly any audit would meet."""

    def one_number(mean: torch.Tensor) -> torch.Tensor:
        mean = mean.clone()
        mean[-1] += 5 * mean.norm()
        return mean

    told: list[Judged] = []

    def tell(self: accusing.Accusations, proven: Any) -> None:
        told.append(judge_proof(proven, self._rules, self._context.transport.verify))

    monkeypatch.setattr(Guard, "mean_too_large", lambda *_: False)  # another bound, of ten times
    monkeypatch.setattr(OwnedSlice, "_encode", lied(one_number))
    monkeypatch.setattr(accusing.Accusations, "tell", tell)
    simulation = run(20.0)
    assert set(told) == {Judged(LIAR, LONG)}
    for name in HONEST:
        assert trusted(simulation)[name] == {*HONEST} - {name}
        said = [why for report in simulation.peers[name].reports for why in report.rejected]
        assert said
        assert all(LONG in why for why in said), said
    assert simulation.check_means() > 5


@pytest.mark.parametrize("whose", [*HONEST, "all"])
def test_who_tells_false_norms_of_others_is_found_by_them(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a mean could be as long as its owner likes until an audit meets that slice."""
    encode = OwnedSlice._encode

    def false(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        if owner_of(self) == LIAR:
            told = larger(self._commitments, 2)
            names = [self._begin.members[member] for member in contributors]
            self._commitments = tuple(
                new if whose in (name, "all") and name != LIAR else old
                for name, new, old in zip(names, told, self._commitments, strict=True)
            )
        return encode(self, contributors, mean)

    monkeypatch.setattr(auditor.Claim, "unproved", lambda *_: "")
    monkeypatch.setattr(OwnedSlice, "_encode", false)
    simulation = run(20.0)
    for name in HONEST:
        gone = whose in (name, "all")
        assert trusted(simulation)[name] == ({*HONEST} if gone else {*HONEST, LIAR}) - {name}
    assert simulation.check_means() > 5


def test_a_change_of_the_own_contribution_after_the_others_came_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner's own contribution makes its false mean right; but it named another one before."""
    header = auditor.Auditor.header

    async def naming_another(self: auditor.Auditor, lane: Any) -> Contribution:
        said = await header(self, lane)
        if self._setup.peer_id != LIAR:
            return said
        other = committed(torch.ones(100)).commitment.text
        return replace(said, commitments=tuple(other for _ in said.commitments))

    monkeypatch.setattr(auditor.Auditor, "header", naming_another)
    simulation = run()
    for name in HONEST:
        assert trusted(simulation)[name] == {*HONEST} - {name}


def test_nobody_contributes_to_a_slice_whose_owner_has_not_named_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: set[tuple[int, int]] = set()
    hear, encode = auditor.Auditor.hear, contributing.Contributions.encode

    def heard_now(self: auditor.Auditor, lane: Any, header: Contribution) -> None:
        hear(self, lane, header)
        heard.update((id(self._setup), j) for j in self._theirs)

    def encoded(self: contributing.Contributions, piece: Any, index: int) -> Any:
        assert (id(self._setup), index) in heard, (
            "own contributions are encoded with codecs that lose"
        )
        return encode(self, piece, index)

    monkeypatch.setattr(auditor.Auditor, "hear", heard_now)
    monkeypatch.setattr(contributing.Contributions, "encode", encoded)
    assert run(20.0).check_means() > 5
    assert heard


def spoiling(kind: type[Message], change: Callable[[Any], Message]) -> Any:
    """Have the liar's messages of a kind be others."""
    send = Channel.send

    async def sent(self: Channel, message: Message) -> None:
        caller = asyncio.current_task()
        assert caller is not None
        spoils = isinstance(message, kind) and _sender(self) == LIAR
        await send(self, change(message) if spoils else message)

    return sent


_ENDS: dict[int, str] = {}


def _sender(channel: Channel) -> str:
    return _ENDS.get(id(channel), "")


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know whose channels there are: a lane's two ends are in one process here."""
    over = exchange.Exchange._exchange_over

    async def known(self: exchange.Exchange, channel: Channel, lane: Any) -> None:
        _ENDS[id(channel)] = self._setup.peer_id
        await over(self, channel, lane)

    monkeypatch.setattr(exchange.Exchange, "_exchange_over", known)


@pytest.mark.usefixtures("senders")
def test_who_seals_another_contribution_than_it_sends_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(seal: Seal) -> Seal:
        return replace(seal, commitment=f"{'00' * 16} 1.0")

    monkeypatch.setattr(Channel, "send", spoiling(Seal, change))
    simulation = run(30.0)
    reports = [r for name in HONEST for r in simulation.peers[name].reports]
    assert any("not what it signed" in why for report in reports for why in report.rejected)
    whole = [r for r in reports if LIAR in r.contributors and LIAR not in r.reason]
    assert not whole, "it counts in its own slice at most"
    assert simulation.check_means() > 5


@pytest.mark.usefixtures("senders")
@pytest.mark.parametrize("hides", [True, False])
def test_who_shows_something_else_or_nothing_has_no_mean_that_counts(
    hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(evidence: Evidence) -> Message:
        if hides:
            return Mean(contributors=(), digest="", shares=(), commitments=(), signature="")
        return replace(evidence, paths=tuple("00" * 16 for _ in evidence.paths))

    monkeypatch.setattr(Channel, "send", spoiling(Evidence, change))
    simulation = run(30.0)
    assert simulation.check_means() > 5
    for name, peer in simulation.peers.items():
        if name == LIAR:
            continue
        assert hides or not peer.service.context.roster.trusts(LIAR)
        whole = [r for r in peer.reports if LIAR in r.contributors and not r.reason]
        assert not whole, "its slices are missing wherever it takes part"


@pytest.mark.usefixtures("senders")
@pytest.mark.parametrize("contributors", [(0, 0), (9,)], ids=["twice", "strangers"])
def test_who_counts_members_that_cannot_count_is_left_out(
    contributors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(mean: Mean) -> Mean:
        return replace(mean, contributors=contributors) if mean.contributors else mean

    monkeypatch.setattr(Channel, "send", spoiling(Mean, change))
    simulation = run()
    assert simulation.check_means() > 20
    for name in HONEST:
        assert trusted(simulation)[name] == {*HONEST} - {name}


@pytest.mark.usefixtures("senders")
def test_who_says_that_it_holds_nothing_keeps_nobody_from_averaging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel_of = round_member.RoundMember.__init__

    def known(self: Any, context: Any, invite: Any, channel: Channel) -> None:
        _ENDS[id(channel)] = context.peer_id
        channel_of(self, context, invite, channel)

    def nothing(held: Held) -> Held:
        return Held(digests=("",) * len(held.digests))

    monkeypatch.setattr(round_member.RoundMember, "__init__", known)
    monkeypatch.setattr(Channel, "send", spoiling(Held, nothing))
    simulation = run()
    assert simulation.check_means() > 20
    last = [report for name in HONEST for report in simulation.peers[name].reports[-8:]]
    assert [report for report in last if {*HONEST} <= set(report.contributors)]
