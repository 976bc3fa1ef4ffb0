"""Getting into a run on machines that stand still: what proves nothing is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from atombench.virtual.clock import VirtualLoop, run_virtual
from atomtrain.errors import SwarmError
from atomtrain.swarm.catchup import joining
from atomtrain.swarm.catchup.joining import send_manifest
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.config import PROTOCOL, Manifest, SwarmConfig
from atomtrain.swarm.membership.directory import NobodyIntroduces, SwarmClock
from atomtrain.swarm.node.entering import TRIES, TRY_S, persistently
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import Open, Refused
from atomtrain.swarm.transport.transport import Channel, LinkLost
from tests.support.waiting import PATIENCE_S

MANIFEST = Manifest("run", (7,))
CONFIG = SwarmConfig(run="run")


def now_s() -> float:
    return asyncio.get_running_loop().time()


def stand_still(for_s: float) -> None:
    """Let time pass in which nothing runs, as for a process that is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._jumping.now_s += for_s


async def within_10_s() -> None:
    """Fail as whatever has a deadline does."""
    try:
        async with asyncio.timeout(10):
            await asyncio.sleep(20)
    except TimeoutError as error:
        raise SwarmError("no answer in time") from error


def entered(enter: Callable[[int], Awaitable[None]]) -> tuple[int, str, float]:
    """Return how often it was tried, how it failed, and when that was."""
    tries = 0

    async def once() -> None:
        nonlocal tries
        tries += 1
        await enter(tries)

    async def scenario() -> tuple[str, float]:
        try:
            await persistently(once)
        except SwarmError as error:
            return str(error), now_s()
        return "", now_s()

    why, ended_s = run_virtual(scenario)
    return tries, why, ended_s


@pytest.mark.parametrize("still_s", [12.0, 3600.0])
def test_a_deadline_that_passed_while_all_stood_still_proves_nothing(still_s: float) -> None:
    async def enter(number: int) -> None:
        if number <= 2:
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_later(0.1, stand_still, still_s)
            await within_10_s()

    assert entered(enter)[:2] == (3, "")


def test_a_deadline_that_passed_while_this_peer_ran_does() -> None:
    async def enter(_: int) -> None:
        await within_10_s()

    assert entered(enter) == (1, "no answer in time", pytest.approx(10.0))


def test_who_always_stands_still_gives_up() -> None:
    async def enter(_: int) -> None:
        stand_still(20)
        await asyncio.sleep(0.1)
        raise SwarmError("not today")

    assert entered(enter)[:2] == (TRIES, "not today")


def test_whoever_let_a_newcomer_in_and_was_lost_then_is_not_the_last_try() -> None:
    async def enter(number: int) -> None:
        await asyncio.sleep(1)
        if number == 1:
            raise NobodyIntroduces("gone")

    assert entered(enter)[:2] == (2, "")


def test_what_never_ends_is_ended() -> None:
    closed: list[float] = []

    async def enter(_: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(now_s())

    tries, why, _ = entered(enter)
    assert tries == 1
    assert "did not get ready" in why
    assert closed == pytest.approx([TRY_S])


Answer = Callable[[Channel], Awaitable[None]]


def asked(answer: Answer, dies_s: float = float("inf")) -> tuple[Any, float]:
    """Return what asking a peer for the manifest comes to, and when."""

    async def scenario() -> tuple[Any, float]:
        serving: list[asyncio.Task[None]] = []

        async def open_to(_: str) -> Channel:
            if now_s() > dies_s:
                raise LinkLost("cannot be reached")
            mine, its = channel_pair("me", "it", stall_s=15.0)
            serving.append(asyncio.create_task(answer(its)))  # type: ignore[arg-type]
            return mine

        transport: Any = SimpleNamespace(peer_id="me", learn=lambda *_: None, open=open_to)
        admission = Admission("run", "me")
        result = await joining._try(transport, CONFIG, admission, "it", ["the address"])
        return result, now_s()

    return run_virtual(scenario)


async def give_manifest(channel: Channel) -> None:
    context: Any = SimpleNamespace(
        manifest=MANIFEST, admission=Admission("run", "it"), clock=lambda: 0.0
    )
    await channel.receive(Open, 1.0)
    await channel.receive_any(1.0)
    await send_manifest(channel, context)


@pytest.mark.parametrize("closes", [False, True])
def test_a_peer_that_stands_still_is_waited_for(closes: bool) -> None:
    async def answer(channel: Channel) -> None:
        if now_s() > 30:
            await give_manifest(channel)
        elif closes:  # as one does that finds, once it runs again, that nothing moved in time
            await asyncio.sleep(4)
            channel.close()

    (manifest, _), when_s = asked(answer)
    assert manifest == MANIFEST
    assert 30 < when_s < 45


def test_one_that_never_answers_is_given_up() -> None:
    async def answer(_: Channel) -> None:
        return

    why, when_s = asked(answer)
    assert "the address is reached, but has not answered" in why
    assert 45 < when_s < 60


def test_one_that_dies_meanwhile_is_given_up_then() -> None:
    async def answer(_: Channel) -> None:
        return

    why, when_s = asked(answer, dies_s=15.0)
    assert "no peer answers at the address" in why
    assert when_s < 25


def test_a_refusal_is_an_answer() -> None:
    async def answer(channel: Channel) -> None:
        with contextlib.suppress(LinkLost):
            await channel.send(Refused(reason="it is full", run="run", protocol=PROTOCOL))

    why, when_s = asked(answer)
    assert "turns this one away: it is full" in why
    assert when_s < 1


def way_in(told: dict[str, tuple[Manifest, float]], given: Sequence[str]) -> Any:
    """Return what a newcomer learns of peers, by address what each tells of run and time."""

    async def answered(_: Any, __: Any, ___: Any, ____: str, addresses: list[str]) -> Any:
        manifest, off_s = told[addresses[0]]
        return manifest, SwarmClock(off_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_try", answered)
        patch.setattr(joining, "peer_of", lambda address: address)
        patch.setattr(joining, "first_hop", lambda address: address)
        config = SwarmConfig(run="run", join=tuple(given))
        transport: Any = SimpleNamespace(peer_id="me")
        admission = Admission("run", "me")
        return run_virtual(lambda: joining.connect_any(transport, config, admission))


def test_the_run_is_what_most_of_the_peers_that_were_named_tell() -> None:
    false = Manifest("run", (9,))
    told = {"a": (MANIFEST, 0.5), "liar": (false, 3600.0), "c": (MANIFEST, 0.4)}
    way = way_in(told, ("liar", "a", "c"))
    assert way.manifest == MANIFEST
    assert way.clock.offset_s == 0.4
    assert set(way.through) == {"a", "c"}
    with pytest.raises(SwarmError, match="could not tell who is right") as caught:
        way_in(told, ("liar", "a"))
    assert "\n" not in str(caught.value)


def test_the_time_is_in_the_middle_of_what_the_peers_tell() -> None:
    told = {"a": (MANIFEST, 0.5), "liar": (MANIFEST, -3600.0), "c": (MANIFEST, 0.4)}
    assert way_in(told, ("liar", "a", "c")).clock.offset_s == 0.4


LIGHT = """
import sys
from atomtrain.swarm.transport.libp2p import import_hivemind
import_hivemind()
assert not {"scipy", "hivemind.averaging", "hivemind.optim", "hivemind.moe"} & set(sys.modules)
from hivemind.dht.node import DHTNode
import_hivemind()
assert "hivemind.averaging" not in sys.modules
import hivemind
from hivemind import DHT, DecentralizedAverager
assert hivemind.averaging.DecentralizedAverager is DecentralizedAverager
assert hivemind.DHT is DHT is hivemind.dht.DHT
assert hivemind.dht.node.DHTNode is DHTNode
assert hivemind.__version__.startswith("1.")
try:
    hivemind.nothing
except AttributeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="hivemind is not there")
def test_what_is_not_used_of_hivemind_is_not_imported_until_asked_for() -> None:
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "module 'hivemind' has no attribute 'nothing'" in done.stdout
