"""Catching up: several donors, resumed transfers, slow links, and everybody gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from atombench.virtual.clock import run_virtual
from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.messages import AnchorHeader, AskAnchor
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import SimulatedPeer, Simulation


def slow_down(monkeypatch: pytest.MonkeyPatch, peer: SimulatedPeer, bytes_per_s: float) -> None:
    """Let whole anchors trickle in at one peer; rounds travel in fewer bits and are not slowed."""
    receive_into, transport = Channel.receive_into, peer.service.context.transport
    open_channel, part = transport.open, int(bytes_per_s)

    async def trickle(self: Channel, view: memoryview) -> None:
        if len(view) < 8000 or not getattr(self, "slow", False):
            await receive_into(self, view)
            return
        for start in range(0, len(view), part):
            await asyncio.sleep(1.0)
            await receive_into(self, view[start : start + part])

    async def open_slow(peer_id: str, **how: Any) -> Channel:
        channel = await open_channel(peer_id, **how)
        channel.slow = True  # type: ignore[attr-defined]
        return channel

    monkeypatch.setattr(Channel, "receive_into", trickle)
    monkeypatch.setattr(transport, "open", open_slow)


@pytest.mark.slow
def test_a_link_too_slow_to_keep_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fragment takes 20 s to fetch and is averaged every 8 s: still the newcomer gets there."""

    async def scenario() -> None:
        simulation = Simulation((4000, 4000), seed=21, wire="int4")
        for name in ("a", "b"):
            await simulation.add(name, step_s=2.0)
        await asyncio.sleep(10)
        late = SimulatedPeer(simulation, "late", 2.0)
        simulation.peers["late"] = late
        slow_down(monkeypatch, late, 800.0)
        await late.start()
        best = late.service.context.roster.best()
        own = late.service.context.mailbox.store.stamps()
        assert any(b and s and b.beats(s) for b, s in zip(best, own, strict=True))
        steps = simulation.peers["a"].service.context.mailbox.progress.steps
        await asyncio.sleep(120)
        done = simulation.peers["a"].service.context.mailbox.progress.steps - steps
        assert done > 120 / 2.0 * 0.95, "nobody waits for the newcomer but rounds"
        recent = late.reports[-4:]
        assert {report.fragment for report in recent} == {0, 1}
        assert all("late" in report.contributors for report in recent)
        assert all(len(report.contributors) == 3 for report in recent)
        simulation.check_means()

    run_virtual(scenario)


def note_asks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, AskAnchor]]:
    """Return the list in which every request for an anchor will be noted, with its donor."""
    asks: list[tuple[str, AskAnchor]] = []
    send = Channel.send

    async def noted(self: Channel, message: Any) -> None:
        if isinstance(message, AskAnchor):
            asks.append((self.remote, message))
        await send(self, message)

    monkeypatch.setattr(Channel, "send", noted)
    return asks


def test_fetches_go_to_several_donors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        simulation = Simulation((30, 30, 30), seed=22, local_steps_per_round=300)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(3)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        asks = note_asks(monkeypatch)
        await asyncio.gather(*(late.service.fetch(f, 10.0) for f in range(3)))
        assert sorted(donor for donor, _ in asks) == ["a", "b", "c"]
        await late.stop_abruptly()

    run_virtual(scenario)


def test_what_came_from_a_lost_donor_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 1_000_000  # four pieces of a mebibyte
    asks = note_asks(monkeypatch)

    async def scenario() -> None:
        simulation = Simulation((elements,), seed=23, local_steps_per_round=100_000)
        for name in ("a", "b"):
            await simulation.add(
                name, step_s=0.5, step=lambda _: None, upload_limit_bytes_per_s=1e6
            )
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        fetching = asyncio.ensure_future(late.service.fetch(0, 10.0))
        fetcher = late.service._repairer.fetcher
        while not fetcher._partial or fetcher._partial[0].filled_bytes < 2 << 20:
            await asyncio.sleep(0.001)
        donor = next(iter(+fetcher._asked))
        await simulation.kill(donor)
        anchor = await fetching
        (other,) = simulation.peers
        assert torch.equal(
            anchor.values, simulation.peers[other].service.context.mailbox.store.anchor(0).values
        )
        await late.stop_abruptly()

    run_virtual(scenario)
    assert asks[-1][1].start_bytes >= 2 << 20
    assert asks[-1][1].digest != ""


def test_the_rest_of_another_anchor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor that goes on in the middle of something else does not get away with it."""
    send = Channel.send

    async def shifted(self: Channel, message: Any) -> None:
        if isinstance(message, AnchorHeader):
            message = replace(message, start_bytes=40)
        await send(self, message)

    async def scenario() -> None:
        simulation = Simulation((30,), seed=24)
        await simulation.add("a", step_s=0.5)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        with pytest.raises(SwarmError, match="the rest of something else"):
            await late.service.fetch(0, 2.0)
        await late.stop_abruptly()

    monkeypatch.setattr(Channel, "send", shifted)
    run_virtual(scenario)


@pytest.mark.parametrize("spoilt", ["a", "ab"])
def test_what_has_another_hash_is_fetched_from_somebody_else(spoilt: str) -> None:
    async def scenario() -> None:
        simulation = Simulation((30,), seed=26, local_steps_per_round=100_000)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.5, step=lambda _: None)
        right = simulation.peers["b"].service.context.mailbox.store.anchor(0).values.clone()
        for name in spoilt:
            simulation.peers[name].service.context.mailbox.store.anchor(0).values.add_(0.001)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        for _ in range(4):  # from one donor, and the other
            fetch = late.service.fetch(0, 3.0)
            if spoilt == "a":
                assert torch.equal((await fetch).values, right)
            else:
                with pytest.raises(SwarmError, match="wrong hash"):
                    await fetch
        await late.stop_abruptly()

    run_virtual(scenario)


def test_when_all_have_left_nobody_is_waited_for() -> None:
    async def scenario() -> None:
        simulation = Simulation((30,), seed=25)
        only = await simulation.add("a", step_s=0.5)
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        await only.service.stop(1.0)
        await only.stop_abruptly()
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(SwarmError, match="have finished and left"):
            await late.service.fetch(0, 70.0)
        assert asyncio.get_running_loop().time() - begun_s < 5
        await late.stop_abruptly()

    run_virtual(scenario)
