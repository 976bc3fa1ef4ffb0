"""The streams of an exchange between two members: which there are, and what each of them carries.

Half of two members' lanes are opened by each: so each dials the other, and learns at once if it is
gone. A lane is used alike in both directions.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.slices import streams_per_neighbour
from atomtrain.swarm.transport.transport import Channel, LinkLost


class Lane(NamedTuple):
    """One stream between this member and another of the group."""

    member: int
    """The other's index in the group."""
    stream: int
    """The stream's number among those that the same side opens."""
    mine: bool
    """Whether this member opens it."""


class _Arrival:
    """What is known of a lane that the other member opens."""

    def __init__(self) -> None:
        self.channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()


class Lanes:
    """All lanes of one member in an exchange; belongs to the event loop that runs."""

    def __init__(self, me: int, members: int, slices_each: int) -> None:
        """Lay out the lanes of member `me` of so many, who own `slices_each` slices each."""
        self._me, self.slices_each = me, slices_each
        self._streams = streams_per_neighbour(members, slices_each)
        self.all = tuple(
            Lane(member, stream, mine)
            for member in range(members)
            if member != me
            for stream in range(self._streams)
            for mine in (True, False)
        )
        """Those to each other member."""
        self._arrivals = {lane: _Arrival() for lane in self.all if not lane.mine}

    def slices_of(self, owner: int, lane: Lane) -> range:
        """Return the slices of one of its two members that a lane carries, in their order."""
        lower_opens = lane.mine == (self._me < lane.member)
        place = 2 * lane.stream + (not lower_opens)  # at both ends the same
        first = owner * self.slices_each
        return range(first + place, first + self.slices_each, 2 * self._streams)

    async def arrived(self, channel: Channel, member: int, stream: int) -> None:
        """Hand over a stream that the other member has opened; return when the lane has ended.

        Raises:
            BadMessage: there is no such lane, it is open already, or it is not waited for any more.
        """
        arrival = self._arrivals.get(Lane(member, stream, mine=False))
        if arrival is None:
            raise BadMessage(f"there is no lane {stream}")
        if arrival.channel.done():
            raise BadMessage(f"lane {stream} is open already, or not waited for any more")
        arrival.channel.set_result(channel)
        await arrival.ended.wait()

    async def arrival(self, lane: Lane) -> Channel:
        """Wait for a lane that the other member opens; who gives up waiting does not want it.

        Raises:
            LinkLost: the other member seems to be gone.
        """
        return await self._arrivals[lane].channel

    def end(self, lane: Lane) -> None:
        """Have whoever handed over a lane know that nothing goes over it any more."""
        if not lane.mine:
            self._arrivals[lane].ended.set()

    def give_up(self, member: int) -> None:
        """Wait no longer for lanes of a member that is out of reach; those that came go on."""
        for lane, arrival in self._arrivals.items():
            if lane.member == member and not arrival.channel.done():
                arrival.channel.set_exception(LinkLost("it cannot be reached either"))
