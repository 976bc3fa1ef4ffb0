"""Deadlines follow what was measured: of each peer, of all of them, of this machine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from atombench.virtual.clock import VirtualLoop, run_virtual
from atomtrain.swarm.membership.deadlines import MOST_S, Estimate, LoopStalls, Waits
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import AskDial, Dialled
from atomtrain.swarm.transport.transport import LinkLost
from tests.support.swarm_virtual import Simulation

FIRST = {"answer_s": 10.0, "stall_s": 15.0, "floor_s": 5.0, "beat_s": 7.0, "life_s": 30.0}


def waits() -> Waits:
    return Waits(**FIRST)


def test_estimates_are_those_of_rfc_6298() -> None:
    estimate = Estimate()
    assert estimate.most_s is None
    estimate.observe(1.0)
    assert estimate.most_s == 1.0 + 4 * 0.5
    estimate.observe(2.0)
    # RTTVAR = 3/4 0.5 + 1/4 |1 - 2|, SRTT = 7/8 1 + 1/8 2
    assert estimate.most_s == pytest.approx(1.125 + 4 * 0.625)
    for _ in range(100):
        estimate.observe(2.0)
    assert estimate.most_s == pytest.approx(2.0, rel=1e-3)


def test_initial_values_hold_until_something_was_measured() -> None:
    one = waits()
    assert (one.answer_s("a"), one.stall_s("a"), one.floor_s(["a"])) == (10.0, 15.0, 5.0)
    one.observe_beat("a", 100.0)
    assert (one.answer_s("a"), one.stall_s("a"), one.floor_s(["a"])) == (10.0, 15.0, 5.0)


def test_answers_make_the_deadline_of_a_peer_and_all_of_them_that_of_a_stranger() -> None:
    one = waits()
    for _ in range(100):
        one.observe_answer("near", 0.01)
    # The first packets of a connection are sent again after 1 and 2 s, whatever was measured.
    assert one.answer_s("near") == pytest.approx(0.01 + 3.0, abs=0.01)
    assert one.answer_s("stranger") == one.answer_s("near")
    for _ in range(100):
        one.observe_answer("far", 2.0)
    assert one.answer_s("far") == pytest.approx(4 * 2.0, rel=0.01)
    assert one.answer_s("near") < 3.1
    assert one.answer_s("stranger") > one.answer_s("near")
    assert one.floor_s(["near", "far"]) == pytest.approx(2 * one.answer_s("far"))
    assert one.floor_s(["near"]) == pytest.approx(2 * one.answer_s("near"))


def test_who_is_dialled_is_given_what_all_take_and_never_more_than_at_first() -> None:
    one = waits()
    assert one.dial_s() == 10.0
    for _ in range(100):
        one.observe_answer("near", 0.01)
    assert one.dial_s() == pytest.approx(0.01 + 3.0, abs=0.01)
    for _ in range(100):
        one.observe_answer("far", 2.0)
    assert one.dial_s() == pytest.approx(4 * 2.0, rel=0.01)
    for _ in range(100):
        one.observe_answer("snail", 60.0)
    assert one.dial_s() == 10.0


def test_a_peer_dials_others_for_as_long_as_it_has_measured(monkeypatch: Any) -> None:
    monkeypatch.setattr("atomtrain.swarm.node.service.dialled", lambda addresses: addresses)
    monkeypatch.setattr(Waits, "dial_s", lambda self: 7.25)
    given_s: list[float] = []

    async def scenario() -> None:
        simulation = Simulation((8,), seed=1)
        one = await simulation.add("a", step_s=0.5)

        async def answers(address: str, within_s: float) -> bool:
            given_s.append(within_s)
            return True

        one.service.context.transport.answers = answers
        mine, theirs = channel_pair("a", "b", stall_s=5.0)
        await one.service._dial(mine, AskDial(address="memory/b"))
        assert (await theirs.receive(Dialled, 1.0)).answered

    run_virtual(scenario)
    assert given_s == [7.25]


def test_a_deadline_that_passed_is_doubled_until_an_answer_comes() -> None:
    one = waits()
    one.observe_answer("a", 0.5)
    first_s = one.answer_s("a")
    waited_s = []
    for _ in range(6):
        one.missed("a")
        waited_s.append(one.answer_s("a"))
    assert waited_s == [pytest.approx(first_s * k) for k in (2, 4, 8, 8, 8, 8)]
    one.observe_answer("a", 0.5)
    assert one.answer_s("a") < first_s


def test_who_claims_to_be_slow_is_not_waited_for_by_all() -> None:
    one = waits()
    for peer in "abcd":
        for _ in range(50):
            one.observe_answer(peer, 0.01)
    usual_s = one.floor_s("abcd")
    for _ in range(50):
        one.observe_answer("snail", 100.0)
    assert one.answer_s("snail") == MOST_S
    assert one.floor_s([*"abcd", "snail"]) <= 8 * usual_s * 1.01


def test_heartbeats_tell_how_long_a_peer_may_be_silent() -> None:
    regular, irregular = waits(), waits()
    for one in (regular, irregular):
        one.observe_answer("a", 0.001)
    at_s = [0.0, 0.0]
    for beat in range(100):
        at_s[0] += 3.0
        at_s[1] += 25.0 if beat % 2 else 1.0  # its machine is busy
        regular.observe_beat("a", at_s[0])
        irregular.observe_beat("a", at_s[1])
    # It need not beat more often than every 7 s; a packet lost three times takes 1.4 s.
    assert regular.stall_s("a") == pytest.approx(7.0 + 1.4, abs=0.05)
    assert irregular.stall_s("a") > 40
    irregular.observe_beat("a", at_s[1] + 1e9)  # or its clock is
    assert irregular.stall_s("a") <= MOST_S


def test_lateness_of_this_machine_widens_every_deadline_for_a_while() -> None:
    loop = VirtualLoop()

    async def scenario() -> None:
        one = waits()
        one.observe_answer("a", 0.01)
        before_s = [one.answer_s("a"), one.stall_s("a"), one.floor_s("a"), one.answer_s("b")]
        watching = asyncio.create_task(one.stalls.watch())
        await asyncio.sleep(1.0)
        assert one.late_s == pytest.approx(0.0, abs=1e-6)
        loop._jumping.now_s += 6.6  # as seen on a machine with twenty programs for two cores
        await asyncio.sleep(0.5)
        assert 12.6 < one.late_s < 13.3
        after_s = [one.answer_s("a"), one.stall_s("a"), one.floor_s("a"), one.answer_s("b")]
        assert all(after - before > 12.6 for before, after in zip(before_s, after_s, strict=True))
        loop._jumping.now_s += 3600.0  # asleep: gone for the others, who wait for nobody that long
        await asyncio.sleep(0.5)
        assert one.late_s < 13.3
        await asyncio.sleep(660.0)
        assert one.late_s == pytest.approx(0.0, abs=1e-6), "that was ten minutes ago"
        watching.cancel()

    run_virtual(scenario, loop)


def test_stalls_without_bound_remembers_the_longest() -> None:
    loop = VirtualLoop()

    async def scenario() -> None:
        still = LoopStalls()
        assert still.look() == 0.0
        loop._jumping.now_s += 3600.25
        assert still.look() == pytest.approx(3600.0)

    run_virtual(scenario, loop)


def test_a_silent_stream_breaks_at_the_deadline_as_it_is_by_then() -> None:
    """What is measured while a stream is open counts, too."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        mine, _ = channel_pair("me", "them", stall_s=1.0)
        stall_s = [4.0]
        mine.stall = lambda: stall_s[0]
        begun_s = loop.time()
        with pytest.raises(LinkLost, match="nothing moved"):
            await mine.receive_into(memoryview(bytearray(8)))
        assert 4.0 <= loop.time() - begun_s < 4.5
        stall_s[0] = 9.0
        begun_s = loop.time()
        with pytest.raises(LinkLost, match="nothing moved"):
            await mine.receive_into(memoryview(bytearray(8)))
        assert 9.0 <= loop.time() - begun_s < 9.6

    run_virtual(scenario)


@pytest.mark.slow
def test_peers_measure_each_other() -> None:
    """In a swarm that trains, no deadline is an initial value any more."""

    async def measured(delay_s: float) -> list[float]:
        simulation = Simulation((30,), 3, delay_s)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        context = simulation.peers["a"].service.context
        await asyncio.sleep(60)
        waits, timing = context.waits, context.timing
        assert not math.isclose(waits.answer_s("b"), 2.0)
        assert not math.isclose(waits.stall_s("b"), 3.0)
        assert {r.outcome for r in simulation.peers["a"].reports[-5:]} == {"averaged"}
        return [waits.answer_s("b"), waits.stall_s("b"), timing.floor_s]

    async def scenario() -> None:
        near_s, far_s = await measured(0.01), await measured(2.0)
        assert all(far > near + 0.1 for far, near in zip(far_s, near_s, strict=True))

    run_virtual(scenario)


def test_who_cannot_be_dialled_in_time_is_given_longer_the_next_time() -> None:
    async def scenario() -> None:
        simulation = Simulation((30,), 4)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        context, loop = simulation.peers["a"].service.context, asyncio.get_running_loop()
        usual_s = context.waits.answer_s("b")
        simulation.network.delay_s = lambda: 1000.0
        for _ in range(4):
            begun_s, within_s = loop.time(), context.waits.answer_s("b")
            with pytest.raises(LinkLost, match="in time"):
                await context.open("b")
            assert loop.time() - begun_s == pytest.approx(within_s)
        assert context.waits.answer_s("b") == pytest.approx(8 * usual_s)

    run_virtual(scenario)
