"""Who sends a byte now and then holds a receiver for a stall deadline, and what its bytes earn."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import Known, Propose, encode
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.transport import LEAST_BYTES_PER_S, Channel, LinkLost

STALL_S = 10.0
PAUSE_S = 4.0
MANY = 1 << 14


async def _dripped(
    receive: Callable[[Channel], Awaitable[object]], head: bytes = b"", a_time: int = 1
) -> float:
    """Return after how long a receiver gives up, to which so many bytes come at a time."""
    mine, theirs = channel_pair("me", "them", STALL_S)

    async def drip() -> None:
        await theirs.send_bytes(head)
        while True:
            await theirs.send_bytes(bytes(a_time))
            await asyncio.sleep(PAUSE_S)

    dripping = asyncio.create_task(drip())
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with pytest.raises(LinkLost, match="nothing moved in time"):
        await receive(mine)
    dripping.cancel()
    return loop.time() - begun_s


@pytest.mark.parametrize("a_time", [1, 100])
def test_what_is_long_does_not_drip(a_time: int) -> None:
    async def scenario() -> None:
        held_s = await _dripped(
            lambda channel: channel.receive_into(memoryview(bytearray(MANY))), a_time=a_time
        )
        assert STALL_S <= held_s <= 1.5 * STALL_S

    run_virtual(scenario)


def test_a_message_does_not_drip() -> None:
    """Also one that has begun in time."""

    async def scenario() -> None:
        head = struct.pack(">I", MANY)
        held_s = await _dripped(lambda channel: channel.receive(Known, STALL_S), head)
        assert STALL_S <= held_s <= 1.5 * STALL_S

    run_virtual(scenario)


def test_who_gives_what_counts_as_least_may_go_on() -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("me", "them", STALL_S)
        count = int(100 * STALL_S * LEAST_BYTES_PER_S)

        async def send() -> None:
            for _ in range(int(count / LEAST_BYTES_PER_S / PAUSE_S)):
                await asyncio.sleep(PAUSE_S)
                await theirs.send_bytes(bytes(int(PAUSE_S * LEAST_BYTES_PER_S)))

        sending = asyncio.create_task(send())
        await mine.receive_into(memoryview(bytearray(count)))
        await sending
        assert asyncio.get_running_loop().time() > 99 * STALL_S
        said = encode(Propose(round_index=3))
        await theirs.send_bytes(struct.pack(">I", len(said)) + said)
        assert await mine.receive(Propose, 1.0) == Propose(round_index=3)

    run_virtual(scenario)


def test_streams_that_share_the_least_upload_limit_go_on() -> None:
    """A member of a round sends to all others at once."""

    async def scenario() -> None:
        pacer, pairs = Pacer(1000.0), [channel_pair("me", str(i), STALL_S) for i in range(6)]
        for mine, _ in pairs:
            mine.pacer = pacer
        coming = [theirs.receive_into(memoryview(bytearray(MANY))) for _, theirs in pairs]
        await asyncio.gather(*coming, *(mine.send_bytes(bytes(MANY)) for mine, _ in pairs))
        assert asyncio.get_running_loop().time() > 0.9 * len(pairs) * MANY / 1000.0

    run_virtual(scenario)
