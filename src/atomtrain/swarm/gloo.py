"""Rounds over Gloo: for fast networks whose every machine is trusted.

Takes the place of the butterfly in a round and nothing else: membership, groups and decisions are
as ever. For each round its members make a process group of their own, reduce the fragment in it,
and end it; a member that dies ends the round, and the next one's group is made without it. Nothing
is encrypted, judged or encoded here.

The first member of the group keeps the store at which the others meet. They learn its port over a
stream of the swarm, which also proves that they belong there.
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import torch

from atomtrain.swarm.anchors import digest_of
from atomtrain.swarm.codec import square_of
from atomtrain.swarm.exchange import ExchangeResult, ExchangeSetup, checked_place
from atomtrain.swarm.large import large_empty
from atomtrain.swarm.messages import BadMessage, Begin, Contribution, Meeting
from atomtrain.swarm.owning import SliceMean
from atomtrain.swarm.slices import Span, slice_spans, slices_per_member
from atomtrain.swarm.transport import Channel, LinkLost

_PORTS_MAX = 65535


class GlooExchange:
    """One member's part in the exchange of a round, over a process group of that round."""

    def __init__(self, setup: ExchangeSetup, begin: Begin, host: str) -> None:
        """Take the place of `setup.peer_id` in the group; `host` is where others reach it.

        Raises:
            BadMessage: the group is not one this member can be in.
        """
        self._me = checked_place(setup, begin)
        self._setup, self._begin, self._host = setup, begin, host
        elements, members = setup.snapshot.values.numel(), len(begin.members)
        self._spans = slice_spans(elements, members * slices_per_member(elements, members))
        self._channels: list[Channel] = []
        self._values = large_empty(elements)
        loop = asyncio.get_running_loop()
        self._until_s = loop.time() + begin.exchange_s
        self._port: asyncio.Future[int] = loop.create_future()
        self._group: Any = None

    async def run(self) -> ExchangeResult:
        """Return all means, or none: at the exchange's deadline at the latest."""
        means: list[SliceMean | None] = [None] * len(self._spans)
        try:
            async with asyncio.timeout_at(self._until_s):
                means = [*await self._reduced()]
        except (
            LinkLost,
            BadMessage,
            TimeoutError,
            RuntimeError,
        ):  # Gloo's errors are RuntimeErrors
            pass
        finally:
            if not self._port.done():
                self._port.cancel()
            if self._group is not None and not all(means):
                self._group.abort()  # a thread may still wait for members that are gone
        return ExchangeResult(means, self._channels, self._values)

    async def serve(self, channel: Channel, header: Contribution) -> None:
        """Tell a member where the group meets.

        Raises:
            BadMessage: it is not in the group, or this is not its first member.
        """
        if channel.remote not in self._begin.members or self._me != 0:
            raise BadMessage(f"peer {channel.remote[-8:]} does not meet anybody here")
        self._channels.append(channel)
        async with asyncio.timeout_at(self._until_s):
            port = await asyncio.shield(self._port)
        await channel.send(Meeting(host=self._host, port=port))

    async def _reduced(self) -> list[SliceMean]:
        left = datetime.timedelta(seconds=self._begin.exchange_s)
        if self._me == 0:
            store = await asyncio.to_thread(self._store, self._host, 0, left)
            self._port.set_result(store.port)
        else:
            store = await asyncio.to_thread(self._store, *await self._meeting(), left)
        return await asyncio.to_thread(self._reduce, store, left)

    async def _meeting(self) -> tuple[str, int]:
        channel = await self._setup.open(self._begin.members[0])
        self._channels.append(channel)
        try:
            await channel.send(Contribution(round_id=self._begin.round_id, lane=0))
            meeting = await channel.receive(Meeting, self._begin.exchange_s)
        finally:
            channel.close()
        if not 0 < meeting.port <= _PORTS_MAX:
            raise BadMessage(f"a group cannot meet at port {meeting.port}")
        return meeting.host, meeting.port

    def _store(self, host: str, port: int, left: datetime.timedelta) -> Any:
        return _distributed().TCPStore(
            host, port, is_master=self._me == 0, wait_for_workers=False, timeout=left
        )

    def _reduce(self, store: Any, left: datetime.timedelta) -> list[SliceMean]:
        """Return the means; raises `RuntimeError` when a member is lost."""
        distributed = _distributed()
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = left
        options._devices = [gloo.create_device(hostname=self._host)]
        begin, elements = self._begin, self._setup.snapshot.values.numel()
        prefixed = distributed.PrefixStore(begin.round_id, store)
        group = self._group = gloo(prefixed, self._me, len(begin.members), options)
        share = begin.weights[self._me] / sum(begin.weights)
        mean = self._values.zero_()
        if share:
            torch.mul(self._setup.snapshot.contribution(Span(0, elements)), share, out=mean)
        group.allreduce([mean]).wait()
        group.barrier().wait()  # the store's keeper must not leave before all have met
        counted = tuple(i for i, weight in enumerate(begin.weights) if weight)
        return [self._held(mean[start:stop], counted) for start, stop in self._spans]

    def _held(self, values: torch.Tensor, counted: tuple[int, ...]) -> SliceMean:
        square = square_of(values)
        if square is None:
            raise RuntimeError("the mean is not finite")
        return SliceMean(values, counted, digest_of(values, None), square)


def _distributed() -> Any:
    """Return `torch.distributed`, whose classes its type hints leave out."""
    import torch.distributed

    return torch.distributed
