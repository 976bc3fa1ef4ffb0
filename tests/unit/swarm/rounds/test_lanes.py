"""Lanes of an exchange: both ends agree on what each carries, and each is opened once."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.slices import streams_per_neighbour
from atomtrain.swarm.rounds.exchange import together
from atomtrain.swarm.rounds.lanes import Lane, Lanes
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.transport import Channel, LinkLost


def a_channel() -> Channel:
    return channel_pair("me", "other", 5.0)[0]


def test_small_groups_have_several_streams_for_each_neighbour() -> None:
    streams = [streams_per_neighbour(members, 9) for members in (2, 3, 4, 5, 9)]
    assert streams == [2, 1, 1, 1, 1]
    assert streams_per_neighbour(2, 1) == 1


@given(st.integers(2, 6), st.integers(1, 12))
def test_both_ends_of_every_lane_agree_and_each_slice_has_one(members: int, each: int) -> None:
    async def check() -> None:
        lanes = [Lanes(me, members, each) for me in range(members)]
        for me, other in permutations(range(members), 2):
            carried: list[int] = []
            for lane in (lane for lane in lanes[me].all if lane.member == other):
                there = Lane(me, lane.stream, not lane.mine)
                assert there in lanes[other].all
                for owner in (me, other):
                    here = lanes[me].slices_of(owner, lane)
                    assert here == lanes[other].slices_of(owner, there)
                carried += lanes[me].slices_of(other, lane)
            assert sorted(carried) == list(range(other * each, (other + 1) * each))

    asyncio.run(check())


def test_a_lane_that_the_other_opens_is_handed_over_once_and_kept_until_it_ends() -> None:
    async def check() -> None:
        lanes, channel = Lanes(0, 2, 4), a_channel()
        lane = Lane(1, 0, mine=False)
        serving = asyncio.create_task(lanes.arrived(channel, 1, 0))
        assert await lanes.arrival(lane) is channel
        with pytest.raises(BadMessage, match="open already"):
            await lanes.arrived(a_channel(), 1, 0)
        assert not serving.done()
        lanes.end(lane)
        await serving

    asyncio.run(check())


def test_there_are_no_lanes_but_those_of_the_members() -> None:
    async def check() -> None:
        lanes = Lanes(0, 2, 4)
        for member, stream in ((0, 0), (1, 2), (2, 0)):
            with pytest.raises(BadMessage, match="no lane"):
                await lanes.arrived(a_channel(), member, stream)

    asyncio.run(check())


def test_who_is_out_of_reach_is_not_waited_for_but_what_came_goes_on() -> None:
    async def check() -> None:
        lanes, channel = Lanes(0, 3, 4), a_channel()
        waiting = [asyncio.create_task(lanes.arrival(Lane(m, 0, mine=False))) for m in (1, 2)]
        serving = asyncio.create_task(lanes.arrived(channel, 2, 0))
        await asyncio.sleep(0)
        lanes.give_up(1)
        lanes.give_up(2)
        with pytest.raises(LinkLost):
            await waiting[0]
        with pytest.raises(BadMessage, match="not waited for"):
            await lanes.arrived(a_channel(), 1, 0)
        assert await waiting[1] is channel
        serving.cancel()

    asyncio.run(check())


def test_what_is_done_together_has_ended_when_one_part_fails() -> None:
    async def lost() -> None:
        raise LinkLost("gone")

    async def other(ended: list[str]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # such as the closing of a stream
            ended.append("other")

    async def run() -> list[str]:
        ended: list[str] = []
        with pytest.raises(LinkLost, match="gone"):
            await together(other(ended), lost())
        return list(ended)

    assert asyncio.run(run()) == ["other"]
