"""What strangers ask too often is refused at once, and no honest swarm meets a limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from atombench.virtual.clock import run_virtual
from atombench.virtual.network import HOST, MemoryTransport
from atomtrain.swarm.rounds.context import opening_to
from atomtrain.swarm.transport import buckets
from atomtrain.swarm.transport.buckets import REFUSAL, Allowance, allowances
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    Accuse,
    AskAnchor,
    AskDial,
    AskKnown,
    AskManifest,
    Message,
    Ping,
    Refused,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.transport import LinkLost
from tests.support.swarm_virtual import Simulation

ELEMENTS = (64, 64)
ALLOWED = allowances(len(ELEMENTS))
ASKED: dict[str, Callable[[str], Message]] = {
    buckets.ANCHORS: lambda _: AskAnchor(fragment=0, digest="", start_bytes=0),
    buckets.PINGS: lambda _: Ping(bytes_count=10),
    buckets.PROBES: lambda me: AskDial(address=f"/ip4/192.0.2.1/tcp/1/p2p/{me}"),
    buckets.ACCUSATIONS: lambda _: Accuse(peer_id="nobody"),
}
MANY = 150


class Stranger:
    """Asks a peer, over a stream for each question."""

    def __init__(self, simulation: Simulation, name: str, asked: str) -> None:
        self._transport = MemoryTransport(simulation.network, name)
        self._asked = asked
        self._opening = opening_to(asked, simulation.peers[asked].service.context.admission)

    async def ask(self, question: Message) -> str:
        """Return the name of the answer, the reason of a refusal, or `closed`."""
        channel = await self._transport.open(self._asked)
        try:
            await channel.send(self._opening)
            await channel.send(question)
            answer = await channel.receive_any(5.0)
        except LinkLost:
            return "closed"
        finally:
            channel.close()
        return answer.reason if isinstance(answer, Refused) else type(answer).__name__


async def _one_peer() -> Simulation:
    simulation = Simulation(ELEMENTS, seed=1, delay_s=0.0)
    await simulation.add("founder", 1.0)
    return simulation


@pytest.mark.parametrize("kind", ASKED)
def test_what_a_peer_asks_for_too_often_is_refused_at_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> tuple[list[str], float, str]:
        loop = asyncio.get_running_loop()
        simulation = await _one_peer()
        stranger = Stranger(simulation, "stranger", "founder")
        begun_s = loop.time()
        answers = [await stranger.ask(ASKED[kind]("stranger")) for _ in range(MANY)]
        taken_s = loop.time() - begun_s
        return answers, taken_s, await Stranger(simulation, "other", "founder").ask(AskManifest())

    with caplog.at_level(logging.WARNING, "atomtrain.swarm"):
        answers, taken_s, other = run_virtual(scenario)
    burst, per_s = ALLOWED[kind]
    let_through = [answer for answer in answers if answer not in (REFUSAL, "closed")]
    assert len(set(let_through)) == 1
    assert burst <= len(let_through) <= burst + per_s * taken_s + 1 < MANY
    assert set(answers[-20:]) <= {REFUSAL, let_through[0]}
    assert sum("more than any peer needs" in r.getMessage() for r in caplog.records) == 1
    assert other == "ManifestHeader", "others pay for it"


def test_made_up_identities_at_one_address_have_a_bound() -> None:
    async def scenario() -> tuple[int, int]:
        simulation = await _one_peer()
        answered = 0
        for number in range(25):
            stranger = Stranger(simulation, f"stranger {number}", "founder")
            for _ in range(8):
                address = f"/ip4/192.0.2.1/tcp/1/p2p/stranger {number}"
                answered += await stranger.ask(AskDial(address=address)) == "Dialled"
        service = simulation.peers["founder"].service
        assert set(service._bounds._buckets._hosts) >= {(buckets.PROBES, HOST)}
        return answered, 25 * 8

    answered, asked = run_virtual(scenario)
    most = buckets.HOST_TIMES * ALLOWED[buckets.PROBES].burst
    assert most <= answered <= most + 2
    assert answered < asked


def test_streams_beyond_the_limit_are_closed_unread() -> None:
    async def scenario() -> list[str]:
        simulation = await _one_peer()
        stranger = Stranger(simulation, "stranger", "founder")
        return [await stranger.ask(AskKnown(fragment=0, version=0, tokens=0, digest="00"))
                for _ in range(500)]  # fmt: skip

    answers = run_virtual(scenario)
    assert "Known" in answers
    assert answers.count("closed") >= 500 - ALLOWED[buckets.STREAMS].burst - 10


def test_streams_through_a_relay_are_counted_for_themselves() -> None:
    async def scenario() -> None:
        watched = buckets.Bounds("relay", 1, lambda: 0.0)
        caller = channel_pair("caller", "relay", 5.0)[1]
        caller.host = HOST
        passed = 0
        while not watched.refusal(caller, RelayTo(peer_id="called", bulk=False)):
            assert watched.admits_stream(caller)
            watched.called_for(caller)
            passed += 1
        assert passed == allowances(1)[buckets.CALLS].burst
        assert watched.refusal(caller, TakeCall(ticket="")) == REFUSAL

    run_virtual(scenario)


def test_streams_through_a_relay_count_no_more_if_one_end_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> float:
        simulation = await _one_peer()
        service = simulation.peers["founder"].service

        async def broken(*_: object) -> None:
            raise LinkLost("the called peer hung up")

        monkeypatch.setattr(service.context.routes.relay, "refusal", lambda *_, **__: "")
        monkeypatch.setattr(service.context.routes.relay, "pass_on", broken)
        stranger = Stranger(simulation, "stranger", "founder")
        for _ in range(50):
            assert await stranger.ask(RelayTo(peer_id="called", bulk=False)) == "closed"
        return service._bounds._buckets._peers[buckets.STREAMS, "stranger"].tokens

    assert run_virtual(scenario) >= ALLOWED[buckets.STREAMS].burst - 1


def test_what_a_peer_asks_itself_has_no_limit() -> None:
    async def scenario() -> None:
        watched = buckets.Bounds("me", 1, lambda: 0.0)
        own = channel_pair("me", "me", 5.0)[1]
        assert all(watched.admits_stream(own) for _ in range(10_000))
        assert not any(watched.refusal(own, Ping(bytes_count=10)) for _ in range(10_000))

    run_virtual(scenario)


def _a_quarter(fragments: int) -> dict[str, Allowance]:
    return {kind: Allowance(a.burst / 4, a.per_s / 4) for kind, a in allowances(fragments).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peers", "step_s", "rules"),
    [
        pytest.param(64, 1.0, {"group_size": 16}, marks=pytest.mark.matrix),
        (12, 1.0, {"group_size": 8}),
        (3, 0.05, {}),
    ],
)
def test_no_honest_swarm_meets_a_limit(
    peers: int, step_s: float, rules: dict[str, int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """64 peers at one address, a round every 2 s; and 3 that have many rounds a second.

    A quarter of what is allowed is enough for them.
    """
    monkeypatch.setattr(buckets, "allowances", _a_quarter)

    async def scenario() -> int:
        simulation = Simulation(ELEMENTS, seed=2, delay_s=0.001, **rules)
        for number in range(peers):
            await simulation.add(f"peer {number:02}", step_s)
        await asyncio.sleep(10)
        return max(max(peer.versions()) for peer in simulation.peers.values())

    with caplog.at_level(logging.WARNING, "atomtrain.swarm"):
        rounds = run_virtual(scenario)
    assert rounds >= 3
    assert not [r for r in caplog.records if "more than any peer needs" in r.getMessage()]
