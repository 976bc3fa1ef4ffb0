"""Machines that sleep for an hour come back without help; clocks that are set harm nobody."""

from __future__ import annotations

import asyncio
import time

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership.directory import SwarmClock, follow_clock
from tests.support.sleeping import Machine, SleepyLoop, on
from tests.support.swarm_virtual import SimulatedPeer, Simulation

pytestmark = pytest.mark.slow

HOUR_S = 3600.0


async def three(
    loop: SleepyLoop, *, clock_stops: bool, step_s: float = 3.0
) -> tuple[Simulation, Machine, SimulatedPeer]:
    """Return peers "a", "b" and "sleeper", the machine that the last is on, and the last."""
    simulation = Simulation((50, 31), seed=1, clock=loop.true_s)
    machine = Machine(clock_stops=clock_stops)
    for name in ("a", "b"):
        await simulation.add(name, step_s=step_s)
    sleeper = await on(machine, simulation.add("sleeper", step_s=step_s))
    return simulation, machine, sleeper


@pytest.mark.parametrize("moment_s", [60.0, 65.9])
@pytest.mark.parametrize("lid", [True, False])
def test_whoever_slept_for_an_hour_catches_up_and_averages_again(
    moment_s: float, lid: bool
) -> None:
    """With the lid closed the clock of deadlines stands still, and all connections are gone.

    A stopped process has deadlines that all pass at once when it goes on, and streams that others
    have given up.
    """
    loop = SleepyLoop()

    async def scenario() -> None:
        simulation, machine, sleeper = await three(loop, clock_stops=lid, step_s=6.0)
        awake = simulation.peers["a"]
        await asyncio.sleep(moment_s)
        assert any(len(report.contributors) == 3 for report in awake.reports)

        machine.sleep()
        if lid:
            simulation.network.split({"a", "b"}, {"sleeper"})
        await asyncio.sleep(HOUR_S)
        behind = min(awake.versions()) - max(sleeper.versions())
        assert behind > 100, "the others have gone on"
        assert not awake.service.context.roster.sees("sleeper"), "its record has expired"
        assert awake.reports[-1].contributors == ("a", "b")

        simulation.network.heal()
        machine.wake()
        before = len(awake.reports)
        await asyncio.sleep(60)
        together = [r for r in awake.reports[before:] if len(r.contributors) == 3]
        assert len(together) > 2
        assert max(sleeper.versions()) >= min(awake.versions()) - 1
        assert await simulation.settle(20)
        assert simulation.check_means() > 200

    run_virtual(scenario, loop)


def test_a_stopped_member_is_waited_for_no_longer_than_its_record_lives() -> None:
    """However long a fetch may take: its streams stay open, so that only its silence tells."""
    loop = SleepyLoop()

    async def scenario() -> None:
        simulation, machine, sleeper = await three(loop, clock_stops=False)
        await asyncio.sleep(60.0)
        for peer in simulation.peers.values():
            peer.service.context.timing.fetch_s = lambda *_: HOUR_S  # type: ignore[method-assign]
        awake = simulation.peers["a"]
        before = len(awake.reports)

        machine.sleep()
        await asyncio.sleep(HOUR_S / 6)
        reports = awake.reports[before:]
        expiry_s = awake.service.context.config.expiry_s
        assert max(report.duration_s for report in reports) < 2 * expiry_s
        assert sum(report.contributors == ("a", "b") for report in reports) > 20

        machine.wake()
        await asyncio.sleep(60)
        assert len(awake.reports[-1].contributors) == 3
        assert max(sleeper.versions()) >= min(awake.versions()) - 1

    run_virtual(scenario, loop)


def test_the_swarms_time_goes_on_in_sleep_and_does_not_follow_the_time_of_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"day": 1000.0, "boot": 50.0}
    monkeypatch.setattr(time, "time", lambda: now["day"])
    clocks = {time.CLOCK_BOOTTIME: "boot"}
    monkeypatch.setattr(time, "clock_gettime", lambda which: now[clocks[which]])
    clock = SwarmClock(offset_s=5.0)
    assert clock() == 1005.0
    now["day"] += HOUR_S  # somebody sets it
    assert clock() == 1005.0
    now["boot"] += HOUR_S  # the machine sleeps
    assert clock() == 1005.0 + HOUR_S


def test_the_hash_table_goes_by_the_swarms_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.dht import node, protocol, routing
    from hivemind.utils import timed_storage

    for module in (node, protocol, routing, timed_storage):
        monkeypatch.setattr(module, "get_dht_time", time.time)
    clock = SwarmClock()
    follow_clock(clock)
    storage = timed_storage.TimedStorage()
    storage.store("record", b"", clock() + 60)
    monkeypatch.setattr(time, "time", lambda: clock() + HOUR_S)
    assert storage.get("record") is not None
    for module in (node, protocol, routing):
        assert module.get_dht_time is clock
