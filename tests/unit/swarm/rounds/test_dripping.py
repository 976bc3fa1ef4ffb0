"""A member that sends byte by byte in rounds: they end, and do not become longer and longer."""

from __future__ import annotations

import asyncio

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.transport.transport import StreamChannel
from tests.support.swarm_virtual import Simulation

HONEST, DRIPPING = ("a", "b", "c"), "d"
PAUSE_S = 1.0
"""From one byte to the next: a third of the stall deadline."""


@pytest.mark.slow
def test_rounds_with_who_drips_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    send = StreamChannel.send_bytes

    async def scenario() -> None:
        simulation = Simulation((300, 120), 5, 0.02)
        for name in (*HONEST, DRIPPING):
            await simulation.add(name, 0.5)
        await asyncio.sleep(20)
        transport = simulation.network.transports[DRIPPING]

        async def send_bytes(channel: StreamChannel, data: bytes | memoryview) -> None:
            its = any(channel is one for one, _ in transport._channels)
            if not its or channel.remote == DRIPPING:
                await send(channel, data)
                return
            for byte in bytes(data):
                await send(channel, bytes([byte]))
                await asyncio.sleep(PAUSE_S)

        monkeypatch.setattr(StreamChannel, "send_bytes", send_bytes)
        before = [simulation.peers[name].versions() for name in HONEST]
        await asyncio.sleep(240)
        for name, versions in zip(HONEST, before, strict=True):
            peer = simulation.peers[name]
            assert peer.service.context.timing.exchange_s(4 * 300) < 30.0
            for new, old in zip(peer.versions(), versions, strict=True):
                assert new >= old + 5

    run_virtual(scenario)
