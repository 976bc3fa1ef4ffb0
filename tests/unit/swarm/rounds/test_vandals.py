"""A peer that floods, repeats, lies and talks nonsense holds nobody up and spoils no mean."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atombench.virtual.network import MemoryDirectory, MemoryTransport
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.transport.messages import (
    AskAnchor,
    AskManifest,
    AskStatus,
    Begin,
    Commit,
    Contribution,
    Held,
    Invite,
    Mean,
    Message,
    Open,
    Ping,
    Propose,
    Ready,
)
from atomtrain.swarm.transport.transport import Channel, LinkLost
from tests.support.going_on import all_go_on
from tests.support.swarm_virtual import Simulation

pytestmark = pytest.mark.slow

LARGEST = 2**53


class Vandal:
    """Opens streams to all others, and says what may do harm."""

    def __init__(self, simulation: Simulation, record: bool) -> None:
        self._simulation = simulation
        self._random = simulation.random
        self._transport = MemoryTransport(simulation.network, "vandal")
        self._directory = MemoryDirectory(simulation.network, "vandal")
        self._record = record
        self._open: list[Channel] = []

    async def rage(self, until_s: float) -> None:
        await self._transport.serve(self._answer)
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            await asyncio.sleep(self._random.uniform(0.01, 0.5))
            if self._record:
                await self._directory.publish(self._forged(), 6.0)
            victims = [name for name in self._simulation.peers if name != "vandal"]
            if victims:
                await self._pester(self._random.choice(victims))
        self._simulation.network.cut("vandal")

    async def _pester(self, victim: str) -> None:
        try:
            channel = await self._transport.open(victim)
            await channel.send(Open(protocol=PROTOCOL, run="sim", proof=""))
            for _ in range(self._random.randint(1, 3)):
                await channel.send(self._message())
            if self._random.random() < 0.4:
                await channel.send_bytes(self._random.randbytes(self._random.randint(1, 400)))
        except LinkLost:
            return
        if self._random.random() < 0.5:
            channel.close()
        else:
            self._open.append(channel)  # and says nothing more

    async def _answer(self, channel: Channel) -> None:
        """Take streams, and be silent, or talk nonsense."""
        if self._random.random() < 0.5:
            await asyncio.sleep(self._random.uniform(0, 20))
        else:
            await channel.send(self._message())
        channel.close()

    def _forged(self) -> bytes:
        """Copy another peer's record, as the vandal's own, with large numbers in it."""
        others = [data for name, (data, _) in self._simulation.network.table("vandal").items()
                  if name != "vandal"]  # fmt: skip
        if not others:
            return b"{}"
        body = json.loads(self._random.choice(others))
        body["peer_id"] = "vandal"
        body["next_round"] = self._random.choice([0, body["next_round"], LARGEST - 1])
        body["step_s"] = self._random.choice([0.0, 1e15])
        body["fetch_bytes_per_s"] = self._random.choice([0.0, 1e-9])
        body["state"] = self._random.choice(["training", "joining"])
        return json.dumps(body).encode()

    def _message(self) -> Message:
        rng = self._random
        ids = [*self._simulation.snapshots, "nothing"][-3:]
        number = rng.choice([0, 1, 5, LARGEST])
        names = ("a", "b", "vandal")
        index = rng.choice([number, *range(40)])
        own_id = f"{index}-vandal-{rng.random()}"
        return rng.choice([
            Propose(round_index=number),
            Invite(round_id=rng.choice([own_id, *ids]), round_index=index,
                   fragment=index % 2, version=number, slack=number,
                   answer_s=float(number)),
            _some(Contribution, round_id=rng.choice(ids)),
            AskAnchor(fragment=rng.randint(0, 3), digest="", start_bytes=number),
            _some(Begin, round_id=rng.choice(ids), members=names, weights=(1, 1, number),
                  exchange_s=1.0),
            Commit(slices=(0, 1, 2), absent=("a", "vandal")),
            _some(Ready, version=number, tokens=number, digest="x", weight=number),
            Held(digests=("x", "y")),
            _some(Mean, contributors=(0, 1), digest="x"),
            AskManifest(), AskStatus(), Ping(bytes_count=number),
        ])  # fmt: skip


def _some(kind: type[Message], **given_values: object) -> Message:
    """Return a message with these values, and empty ones for the rest."""
    empty = {"Count": 0, "Text": "", "bool": True, "Real": 0.0}
    rest = {
        name: empty.get(declared, ())
        for name, declared in kind.__annotations__.items()
        if name not in given_values
    }
    return kind(**rest, **given_values)


@settings(max_examples=12, deadline=None, phases=(Phase.reuse, Phase.generate))  # no long search
@given(
    seed=st.integers(0, 10**6),
    peers=st.integers(2, 4),
    delay_s=st.floats(0.0, 0.3),
    record=st.booleans(),
    death_s=st.floats(1.0, 30.0) | st.none(),
)
def test_vandals_hold_nobody_up(
    seed: int, peers: int, delay_s: float, record: bool, death_s: float | None
) -> None:
    async def scenario() -> None:
        simulation = Simulation((30, 17), seed, delay_s)
        for index in range(peers):
            await simulation.add(f"peer{index}", random.Random(seed + index).uniform(0.3, 2.0))
        raging = asyncio.ensure_future(Vandal(simulation, record).rage(60.0))
        if death_s is not None and peers > 2:
            await asyncio.sleep(death_s)
            await simulation.kill("peer1")
        await raging
        await all_go_on(simulation)
        for peer in simulation.peers.values():
            assert peer.service.context.agenda.next_round < 2**49
        assert await simulation.settle(60)
        simulation.check_means()

    run_virtual(scenario)
