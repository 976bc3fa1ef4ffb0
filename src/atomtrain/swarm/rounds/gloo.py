"""Rounds over Gloo: for fast networks whose every machine is trusted.

Takes the place of the butterfly in a round and nothing else: membership, groups and decisions are
as ever. Members add their weighted contributions up in a process group, which they keep for the
next round if it has the same members. A member that dies ends the round, and the next one's group
is made without it. Nothing is encrypted, judged or encoded here.

The first member keeps the store at which a new group meets. The others ask it where to meet, over a
stream of the swarm, which also proves that they belong there, and say how many rounds the group
that they have kept has had: they stay in it only if that is the same number with all.

The fragment is reduced in chunks: while some are on their way, this member computes what it
contributes to the next, and makes the new anchor of those that have come.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from atomtrain.swarm.anchors.buffer_pool import pooled_empty
from atomtrain.swarm.anchors.updates import Update
from atomtrain.swarm.codecs.codec import square_of
from atomtrain.swarm.codecs.slices import Span, piece_spans, slice_spans, slices_per_member
from atomtrain.swarm.rounds.exchange import checked_place
from atomtrain.swarm.rounds.exchange_setup import ExchangeResult, ExchangeSetup
from atomtrain.swarm.rounds.making import Made, Making
from atomtrain.swarm.rounds.owning import SliceMean
from atomtrain.swarm.transport.messages import BadMessage, Begin, Contribution, Meeting
from atomtrain.swarm.transport.transport import Channel, LinkLost

_PORTS_MAX = 65535
_CHUNK_ELEMENTS = 1 << 20
"""Least size of a chunk, which is whole slices."""
_AHEAD = 3
"""Chunks that are under way while this member computes."""
_CACHED_ELEMENTS = 1 << 16
"""So many stay in the processor's cache from one operation to the next."""


class MeetingPlace(NamedTuple):
    """Where members of a group meet: the store that the first of them keeps."""

    host: str
    port: int


class ProcessGroup:
    """One member's end of a process group, for all rounds that its members have in a row."""

    def __init__(self, members: tuple[str, ...], me: int, host: str) -> None:
        """Take the place `me` among `members`; `host` is where others reach it."""
        self.members = members
        self.rounds = 0
        """In which it has added up everything that it was given."""
        self.place: MeetingPlace | None = None
        """Known once this member has gone there."""
        self._me, self._host = me, host
        self._store: Any = None
        self._group: Any = None

    def open(self, timeout_s: float) -> MeetingPlace:
        """As the first member, have a store at which the others can meet."""
        return self._at(MeetingPlace(self._host, 0), timeout_s)

    def go_to(self, place: MeetingPlace, timeout_s: float) -> None:
        """As any other member, find that store; raises `RuntimeError` when it is gone."""
        self._at(place, timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Connect to all members, once they have a store; blocks until they are there.

        Raises:
            RuntimeError: they are not in that time.
        """
        gloo = _distributed().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=self._host)]
        self._group = gloo(self._store, self._me, len(self.members), options)

    def add_up(self, values: Any, timeout_s: float) -> Any:
        """Begin to replace `values` by the sum of all members'; `wait` for what is returned.

        All members must call this for the same numbers in the same order.
        """
        options = _distributed().AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=timeout_s)
        return self._group.allreduce([values], options)

    def abort(self) -> None:
        """Break off whatever is under way; nothing else can be done with the group then."""
        if self._group is not None:
            self._group.abort()

    def _at(self, place: MeetingPlace, timeout_s: float) -> MeetingPlace:
        self._store = _distributed().TCPStore(
            *place,
            is_master=self._me == 0,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self.place = MeetingPlace(place.host, self._store.port)
        return self.place


class KeptGroup:
    """The group of a peer's last round, if all of it went well; for one round at a time."""

    def __init__(self) -> None:
        """Begin without one."""
        self._group: ProcessGroup | None = None

    def take(self, members: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group if it has these members, and do not keep it any more in any case."""
        group, self._group = self._group, None
        return group if group is not None and group.members == members else None

    def keep(self, group: ProcessGroup) -> None:
        """Keep it for the next round."""
        self._group = group

    def close(self) -> None:
        """Leave the group, if there is one."""
        self._group = None


class GlooExchange:
    """One member's part in the exchange of a round, over a process group."""

    def __init__(
        self, setup: ExchangeSetup, begin: Begin, host: str, update: Update, kept: KeptGroup
    ) -> None:
        """Take the place of `setup.peer_id` in the group; `host` is where others reach it.

        Raises:
            BadMessage: the group is not one this member can be in.
        """
        self._me = checked_place(setup, begin)
        self._setup, self._begin, self._host = setup, begin, host
        self._update, self._kept = update, kept
        elements, members = setup.snapshot.values.numel(), len(begin.members)
        self._spans = slice_spans(elements, members * slices_per_member(elements, members))
        self._channels: list[Channel] = []
        self._values = pooled_empty(elements)
        loop = asyncio.get_running_loop()
        self._until_s = loop.time() + begin.exchange_s
        self._place: asyncio.Future[MeetingPlace] = loop.create_future()
        self._rounds_of: dict[str, int] = {}
        """What others say of the group that they have kept."""
        self._asked = asyncio.Event()
        """All others have asked where to meet."""

    async def run(self) -> ExchangeResult:
        """Return all means and the new anchor, or none: by the exchange's deadline."""
        reduced = None
        group = self._kept.take(self._begin.members)
        try:
            async with asyncio.timeout_at(self._until_s):
                group = await self._met(group)
                reduced = await asyncio.to_thread(self._reduce, group)
            group.rounds += 1
            self._kept.keep(group)
        except (
            LinkLost,
            BadMessage,
            TimeoutError,
            RuntimeError,
        ):  # Gloo's errors are RuntimeErrors
            pass
        finally:
            if not self._place.done():
                self._place.cancel()
            if reduced is None and group is not None:
                group.abort()  # a thread may still wait for members that are gone
        if reduced is None:
            return ExchangeResult([None] * len(self._spans), self._channels, self._values)
        return ExchangeResult(reduced.means, self._channels, self._values, made=reduced.made)

    async def serve(self, channel: Channel, header: Contribution) -> None:
        """Tell a member where the group meets.

        Raises:
            BadMessage: it is not in the group, or this is not its first member.
        """
        if channel.remote not in self._begin.members[1:] or self._me != 0:
            raise BadMessage(f"peer {channel.remote[-8:]} does not meet anybody here")
        self._channels.append(channel)
        self._rounds_of[channel.remote] = header.lane
        if len(self._rounds_of) == len(self._begin.members) - 1:
            self._asked.set()
        async with asyncio.timeout_at(self._until_s):
            host, port = await asyncio.shield(self._place)
        await channel.send(Meeting(host=host, port=port))

    async def _met(self, kept: ProcessGroup | None) -> ProcessGroup:
        """Return a group that all members are in: the one that they have kept, or a new one."""
        rounds = 0 if kept is None else kept.rounds
        new = ProcessGroup(self._begin.members, self._me, self._host)
        if self._me == 0:
            await self._asked.wait()
            if kept is not None and set(self._rounds_of.values()) == {rounds}:
                assert kept.place is not None
                self._place.set_result(kept.place)
                return kept
            self._place.set_result(await asyncio.to_thread(new.open, self._begin.exchange_s))
        else:
            place = await self._asked_first(rounds)
            if kept is not None and kept.place == place:
                return kept
            await asyncio.to_thread(new.go_to, place, self._begin.exchange_s)
        await asyncio.to_thread(new.meet, self._begin.exchange_s)
        return new

    async def _asked_first(self, rounds: int) -> MeetingPlace:
        """Ask the first member where to meet."""
        channel = await self._setup.open(self._begin.members[0])
        self._channels.append(channel)
        try:
            round_id = self._begin.round_id
            await channel.send(
                Contribution(round_id=round_id, lane=rounds, group="", commitments=())
            )
            meeting = await channel.receive(Meeting, self._begin.exchange_s)
        finally:
            channel.close()
        if not 0 < meeting.port <= _PORTS_MAX:
            raise BadMessage(f"a group cannot meet at port {meeting.port}")
        return MeetingPlace(meeting.host, meeting.port)

    def _reduce(self, group: ProcessGroup) -> _Reduced:
        """Return the means, and what they make; raises `RuntimeError` when a member is lost."""
        reducing = _Reducing(self._setup, self._begin, self._update, self._values)
        under_way = deque[tuple[tuple[Span, ...], Any]]()
        for chunk in self._chunks():
            values = reducing.contribution(Span(chunk[0].start, chunk[-1].stop), self._me)
            under_way.append((chunk, group.add_up(values, self._begin.exchange_s)))
            if len(under_way) > _AHEAD:
                reducing.arrived(*under_way.popleft())
        while under_way:
            reducing.arrived(*under_way.popleft())
        return reducing.result(self._spans)

    def _chunks(self) -> Iterator[tuple[Span, ...]]:
        each = max(1, _CHUNK_ELEMENTS // max(1, self._spans[0].elements))
        for first in range(0, len(self._spans), each):
            yield self._spans[first : first + each]


class _Reduced(NamedTuple):
    means: list[SliceMean | None]
    made: Made


class _Reducing:
    """What a member computes before and after Gloo's sums; all of it lies in `values`."""

    def __init__(
        self, setup: ExchangeSetup, begin: Begin, update: Update, values: torch.Tensor
    ) -> None:
        self._snapshot, self._weights, self._values = setup.snapshot, begin.weights, values
        self._counted = tuple(i for i, weight in enumerate(begin.weights) if weight)
        self._making = Making(setup.snapshot, begin, update, values)
        self._squares: list[float] = []

    def contribution(self, span: Span, me: int) -> torch.Tensor:
        """Return a member's part of the mean in a span."""
        share = self._weights[me] / sum(self._weights)
        for start, stop in piece_spans(span, _CACHED_ELEMENTS):
            place = self._values[start:stop]
            if share:
                self._snapshot.contribution(Span(start, stop), place).mul_(share)
            else:
                place.zero_()
        return self._values[span.start : span.stop]

    def arrived(self, slices: tuple[Span, ...], work: Any) -> None:
        """Wait for the next slices' means, and make the new anchor of them."""
        work.wait()
        for span in slices:
            mean = self._values[span.start : span.stop]
            square = square_of(mean)
            if square is None:
                raise RuntimeError("the mean is not finite")
            self._squares.append(square)
            self._making.apply(span, mean, self._counted)

    def result(self, spans: tuple[Span, ...]) -> _Reduced:
        """Return it once all slices have arrived; the anchor's hash stands for each mean's."""
        made = self._making.made()
        places = (self._values[start:stop] for start, stop in spans)
        return _Reduced(
            [
                SliceMean(place, self._counted, made.digest, square)
                for place, square in zip(places, self._squares, strict=True)
            ],
            made,
        )


def _distributed() -> Any:
    """Return `torch.distributed`, whose classes its type hints leave out."""
    import torch.distributed

    return torch.distributed
