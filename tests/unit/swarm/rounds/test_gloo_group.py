"""Rounds over Gloo within one process: the mean, the group that is kept, and members that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from atomtrain.swarm.anchors.anchors import Anchor, Snapshot, digest_of
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.updates import OuterUpdate, Place
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.rounds.exchange_setup import ExchangeResult, ExchangeSetup
from atomtrain.swarm.rounds.gloo import GlooExchange, KeptGroup, ProcessGroup
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import BadMessage, Begin, Contribution
from atomtrain.swarm.transport.transport import Channel
from tests.support.memory_network import unsigned, unverified

pytestmark = pytest.mark.slow

_ELEMENTS = 3_000_001
_MEMBERS = ("a", "b", "c")
_WEIGHTS = (3, 0, 1)
_UPDATE = OuterUpdate(learning_rate=0.5, momentum=0.5)


async def _offload(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


@dataclass
class _Member:
    """What a member keeps from one round to the next."""

    name: str
    anchor: Anchor
    values: torch.Tensor
    kept: KeptGroup = field(default_factory=KeptGroup)


def _members() -> list[_Member]:
    torch.manual_seed(1)
    start = torch.randn(_ELEMENTS)
    velocity = torch.zeros(_ELEMENTS)
    anchor = Anchor(start, velocity, Stamp(4, 10, digest_of(start, velocity)))
    return [_Member(name, anchor, start + torch.randn(_ELEMENTS)) for name in _MEMBERS]


def _kept(member: _Member) -> ProcessGroup:
    group = member.kept._group
    assert group is not None
    return group


class _Round:
    """One round of some members, whose streams go through memory."""

    def __init__(
        self, members: list[_Member], exchange_s: float = 60.0, weights: tuple[int, ...] = _WEIGHTS
    ) -> None:
        names = tuple(member.name for member in members)
        begin = Begin(
            round_id="7-a-0", members=names, weights=weights, late=(False,) * len(names),
            exchange_s=exchange_s, bases=False, version=4, tokens=10, groups=1,
        )  # fmt: skip
        self.exchanges: dict[str, GlooExchange] = {}
        for member, weight in zip(members, weights, strict=True):
            snapshot = Snapshot(0, member.values, member.anchor, weight, weight)
            setup = ExchangeSetup(
                peer_id=member.name,
                snapshot=snapshot,
                codec=codec_named("float32"),
                open=self._opener(member.name),
                offload=_offload,
                sign=unsigned,
                verify=unverified,
            )
            self.exchanges[member.name] = GlooExchange(
                setup, begin, "127.0.0.1", _UPDATE, member.kept
            )
        self._serving: list[asyncio.Task[None]] = []

    def _opener(self, name: str) -> Callable[[str], Awaitable[Channel]]:
        async def open_to(peer_id: str) -> Channel:
            mine, theirs = channel_pair(name, peer_id, 30.0)
            self._serving.append(asyncio.create_task(self._serve(theirs, peer_id)))
            return mine

        return open_to

    async def _serve(self, channel: Channel, peer_id: str) -> None:
        header = await channel.receive(Contribution, 30.0)
        await self.exchanges[peer_id].serve(channel, header)

    async def results(self) -> list[ExchangeResult]:
        found = await asyncio.gather(*(exchange.run() for exchange in self.exchanges.values()))
        for task in self._serving:
            task.cancel()
        return list(found)


def _right(members: list[_Member]) -> torch.Tensor:
    """Return the anchor that a round must make, by another way."""
    total = sum(_WEIGHTS)
    mean = sum(
        weight / total * (member.values.double() - member.anchor.values.double())
        for member, weight in zip(members, _WEIGHTS, strict=True)
    )
    assert isinstance(mean, torch.Tensor)
    values, velocity = members[0].anchor.values.clone(), torch.zeros(_ELEMENTS)
    _UPDATE.apply(values, mean.float(), velocity, place=Place(0, 0, 4))
    return values


def _check(members: list[_Member], results: list[ExchangeResult]) -> None:
    right = _right(members)
    for result in results:
        assert result.made is not None
        torch.testing.assert_close(result.made.values, right, rtol=1e-5, atol=1e-6)
        assert result.made.digest == digest_of(result.made.values, result.made.velocity)
        assert {part.contributors for part in result.made.parts} == {frozenset({"a", "c"})}
    assert len({digest for result in results for digest in result.digests}) == 1


def test_the_new_anchor_is_that_of_the_weighted_mean_and_the_old_one_stays() -> None:
    async def check() -> None:
        members = _members()
        before = members[0].anchor.values.clone()
        _check(members, await _Round(members).results())
        assert torch.equal(members[0].anchor.values, before)
        assert not members[0].anchor.velocity.count_nonzero()  # type: ignore[union-attr]

    asyncio.run(check())


def test_the_same_members_stay_in_their_group_and_others_have_one_of_their_own() -> None:
    async def check() -> None:
        members = _members()
        groups = []
        for _ in range(3):
            _check(members, await _Round(members).results())
            groups.append([_kept(member) for member in members])
        assert groups[0] == groups[1] == groups[2]
        assert [group.rounds for group in groups[0]] == [3, 3, 3]
        two = members[:2]
        assert all(r.made for r in await _Round(two, weights=(1, 1)).results())
        assert _kept(members[0]) is not groups[0][0]
        assert _kept(members[0]).rounds == 1

    asyncio.run(check())


def test_a_member_that_lost_its_group_has_all_make_a_new_one() -> None:
    async def check() -> None:
        for loser in range(3):
            members = _members()
            await _Round(members).results()
            old = [_kept(member) for member in members]
            members[loser].kept.close()
            _check(members, await _Round(members).results())
            assert all(_kept(m) is not group for m, group in zip(members, old, strict=True))
            assert [_kept(member).rounds for member in members] == [1, 1, 1]

    asyncio.run(check())


def test_a_group_that_loses_a_member_ends_the_round_soon_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(group: ProcessGroup) -> None:
        group._group = None  # as the kernel does for a killed process, this closes its connections
        raise RuntimeError("killed")

    async def check() -> None:
        members = _members()
        await _Round(members).results()
        dying = _Round(members)
        monkeypatch.setattr(dying.exchanges["b"], "_reduce", die)
        started_s = asyncio.get_running_loop().time()
        results = await dying.results()
        assert asyncio.get_running_loop().time() - started_s < 30.0
        for result, member in zip(results, members, strict=True):
            assert result.made is None
            assert set(result.digests) == {""}
            assert member.kept._group is None
        _check(members, await _Round(members).results())

    asyncio.run(check())


def test_a_mean_that_is_not_finite_is_none() -> None:
    async def check() -> None:
        members = _members()
        members[2].values[_ELEMENTS - 1] = float("inf")
        assert all(result.made is None for result in await _Round(members).results())

    asyncio.run(check())


def test_only_members_are_told_where_the_group_meets_and_by_the_first() -> None:
    async def check() -> None:
        round_ = _Round(_members())
        for who, asked in (("stranger", "a"), ("a", "a"), ("c", "b")):
            channel = channel_pair(asked, who, 5.0)[0]
            with pytest.raises(BadMessage, match="does not meet anybody"):
                await round_.exchanges[asked].serve(
                    channel, Contribution(round_id="r", lane=0, group="", commitments=())
                )

    asyncio.run(check())
