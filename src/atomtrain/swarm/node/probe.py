"""A look at a swarm from outside, and what the peer that is asked answers.

It can be asked for the swarm as it knows it, and how good the way to it is, step by step.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from atomtrain.errors import BadMessage
from atomtrain.events import is_deep
from atomtrain.swarm.codecs.slices import slices_per_member
from atomtrain.swarm.membership.config import PROTOCOL, SwarmConfig, admission_of
from atomtrain.swarm.membership.routes import pass_through
from atomtrain.swarm.node.round_loop import Group
from atomtrain.swarm.rounds.context import Context, opening_to
from atomtrain.swarm.transport.addresses import Place, circuit_of, place_of
from atomtrain.swarm.transport.libp2p import Libp2pTransport
from atomtrain.swarm.transport.messages import AskStatus, Ping, Pong, StatusHeader
from atomtrain.swarm.transport.transport import Channel, LinkLost, PeerRefused, begun

STATUS_BYTES_MAX = 32 << 20
PING_BYTES_MAX = 4 << 20
_ZEROS = bytes(1 << 18)
_TCP_S = 5.0
_PINGS = 5
_RATE_S, _RATE_PINGS = 2.0, 24
"""How long a rate is measured, and by how many answers at most: see `buckets`."""
_CLOCK_GOOD_S = 1.0
_BEHIND = (
    "a peer behind a NAT has an address through a relay: 'atom swarm status' of any other shows it"
)


def _version() -> str:
    return importlib.metadata.version("atomtrain")


def status_of(context: Context, groups: Sequence[Group]) -> dict[str, Any]:
    """Return what this peer knows of its swarm, JSON-able."""
    best = context.mailbox.store.stamps()
    return {
        "run": context.config.run,
        "protocol": PROTOCOL,
        "version": _version(),
        "time_s": context.clock(),
        "asked": context.peer_id,
        "next_round": context.agenda.next_round,
        "fragments": len(context.manifest.fragment_elements),
        "parameters": sum(context.manifest.fragment_elements),
        "versions": [None if stamp is None else stamp.version for stamp in best],
        "rules": asdict(context.manifest.rules),
        "peers": [asdict(peer) for peer in context.roster.statuses()],
        "relaying": context.routes.relay.status(),
        "rounds": [_round(context, group) for group in groups],
    }


def _round(context: Context, group: Group) -> dict[str, Any]:
    members, fragment = group.begin.members, group.invite.fragment
    each = slices_per_member(context.manifest.fragment_elements[fragment], len(members))
    return {
        "round": group.invite.round_index,
        "fragment": fragment,
        "under_way": group.under_way,
        "reduces": [
            {"peer_id": member, "first_slice": index * each, "slices": each}
            for index, member in enumerate(members)
        ],
    }


async def send_status(channel: Channel, context: Context, groups: Sequence[Group]) -> None:
    """Answer `AskStatus`."""
    data = json.dumps(status_of(context, groups)).encode()
    await channel.send(StatusHeader(bytes_count=len(data)))
    await channel.send_bytes(data)


async def receive_status(channel: Channel, within_s: float) -> dict[str, Any]:
    """Return the answer to `AskStatus`.

    Raises:
        LinkLost: the peer is gone, or refused.
        BadMessage: what came is not a status.
    """
    header = await channel.receive(StatusHeader, within_s)
    if header.bytes_count > STATUS_BYTES_MAX:
        raise BadMessage(f"a status of {header.bytes_count} bytes")
    data = bytearray(header.bytes_count)
    await channel.receive_into(memoryview(data))
    try:
        status = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"the status is not JSON: {error}") from error
    if not isinstance(status, dict) or is_deep(status):
        raise BadMessage("the status is not an object, or is nested too deep")
    return status


async def send_pong(channel: Channel, context: Context, ping: Ping) -> None:
    """Answer `Ping`, with as many bytes as were asked for, and 4 MiB at most."""
    count = min(ping.bytes_count, PING_BYTES_MAX)
    await channel.send(Pong(time_s=context.clock(), version=_version(), bytes_count=count))
    for start in range(0, count, len(_ZEROS)):
        await channel.send_bytes(memoryview(_ZEROS)[: count - start])


class Probe:
    """Streams to peers for somebody who is not a member; made by `probing`."""

    def __init__(self, transport: Libp2pTransport, config: SwarmConfig) -> None:
        """Use an open transport."""
        self._transport = transport
        self._config = config
        self._admission = admission_of(config, transport.peer_id)

    async def open(self, address: str) -> Channel:
        """Return a stream on which protocol and run were announced; raises `LinkLost`."""
        circuit, within_s = circuit_of(address), self._config.endpoint.connect_s
        if circuit is None:
            return await self._dial(place_of(address).peer_id, address)
        inner = await self._dial(circuit.relay_id, circuit.relay_address)
        me = self._transport.identity
        channel = await pass_through(inner, me, circuit.peer_id, within_s, bulk=False)
        return await begun(channel, opening_to(circuit.peer_id, self._admission))

    async def _dial(self, peer_id: str, address: str) -> Channel:
        self._transport.learn(peer_id, (address,))
        try:
            async with asyncio.timeout(self._config.endpoint.connect_s):
                channel = await self._transport.open(peer_id)
        except TimeoutError as error:
            raise LinkLost(f"no stream within {self._config.endpoint.connect_s:.0f} s") from error
        return await begun(channel, opening_to(peer_id, self._admission))

    async def status(self, address: str) -> dict[str, Any]:
        """Return what a peer knows of its swarm; raises `LinkLost` or `BadMessage`."""
        channel = await self.open(address)
        try:
            await channel.send(AskStatus())
            return await receive_status(channel, self._config.endpoint.connect_s)
        finally:
            channel.close()

    async def ping(self, address: str, bytes_count: int = 0) -> tuple[Pong, float, float]:
        """Return the answer, when it was asked for, and when it had come whole (Unix seconds).

        Raises:
            LinkLost: the peer is gone, or refused.
            BadMessage: what came is no answer.
        """
        channel = await self.open(address)
        try:
            asked_s = time.time()
            await channel.send(Ping(bytes_count=bytes_count))
            pong = await channel.receive(Pong, self._config.endpoint.connect_s)
            if pong.bytes_count > bytes_count:
                raise BadMessage("more bytes than were asked for")
            answered_s = time.time()
            await channel.receive_into(memoryview(bytearray(pong.bytes_count)))
            return pong, asked_s, time.time() if bytes_count else answered_s
        finally:
            channel.close()


@asynccontextmanager
async def probing(config: SwarmConfig) -> AsyncIterator[Probe]:
    """Lend a probe; its daemon ends with the block."""
    transport = await Libp2pTransport.create(config.endpoint)
    try:
        yield Probe(transport, config)
    finally:
        await transport.close()


@dataclass(frozen=True)
class Step:
    """One step of a diagnosis."""

    name: str
    good: bool
    detail: str
    fix: str = ""
    """What to do if it is not good."""


@dataclass
class Diagnosis:
    """The steps to a peer, up to the first that failed."""

    address: str
    steps: list[Step] = field(default_factory=list)
    round_trip_s: float | None = None
    clock_offset_s: float | None = None
    """By how much the swarm's time is ahead of this machine's."""
    bytes_per_s: float | None = None
    """Rate of one stream from there to here."""

    @property
    def reached(self) -> bool:
        """Whether all steps went well."""
        return all(step.good for step in self.steps)


async def diagnose(config: SwarmConfig, address: str) -> Diagnosis:
    """Go the way to a peer step by step: name, TCP, libp2p, admission, clock, round trip, rate.

    Raises:
        SwarmError: the address is none, or this machine cannot open streams at all.
    """
    place, found = place_of(address), Diagnosis(address)
    host = await _resolve(place, found)
    if host is not None and await _connect(host, place.port, found):
        async with probing(config) as probe:
            if await _greet(probe, address, config, found):
                await _measure(probe, address, found)
    return found


async def _resolve(place: Place, found: Diagnosis) -> str | None:
    if not place.is_name:
        return place.host
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_TCP_S):
            infos = await loop.getaddrinfo(place.host, place.port, family=socket.AF_INET)
    except (OSError, TimeoutError) as error:
        fix = "check its spelling, and that this machine has a name server; or use an IP address"
        found.steps.append(Step("name", False, f"{place.host} is not known: {error}", fix))
        return None
    host = str(infos[0][4][0])
    found.steps.append(Step("name", True, f"{place.host} is {host}"))
    return host


async def _connect(host: str, port: int, found: Diagnosis) -> bool:
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(_TCP_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        fix = (
            f"a firewall or router drops packets, or the machine is off: open TCP port {port} "
            f"there, forward it in its router, or check the address; {_BEHIND}"
        )
        found.steps.append(Step("TCP", False, f"no answer from {host} in {_TCP_S:.0f} s", fix))
        return False
    except ConnectionRefusedError:
        fix = (
            "check that the peer runs, and listens on that port (--port, and --host 0.0.0.0); "
            + _BEHIND
        )
        found.steps.append(Step("TCP", False, f"{host} refuses port {port}", fix))
        return False
    except OSError as error:
        fix = f"check this machine's network, and the address; {_BEHIND}"
        why = os.strerror(error.errno) if error.errno else str(error)  # asyncio words it anew
        found.steps.append(Step("TCP", False, f"{host} port {port}: {why}", fix))
        return False
    writer.close()
    taken_ms = 1e3 * (time.monotonic() - started_s)
    found.steps.append(Step("TCP", True, f"{host} port {port} answers in {taken_ms:.1f} ms"))
    return True


async def _greet(probe: Probe, address: str, config: SwarmConfig, found: Diagnosis) -> bool:
    """Prove who is there, and be admitted."""
    circuit = circuit_of(address)
    proved = [Step("libp2p", True, "encrypted, and the peer is who the address says")]
    if circuit is not None:
        relay = f"peer {circuit.relay_id[-8:]} passes streams on, and cannot read them"
        proved.insert(0, Step("relay", True, relay))
    try:
        pong, _, _ = await probe.ping(address)
    except PeerRefused as refusal:
        found.steps += proved
        answer = refusal.answer
        if answer.protocol != PROTOCOL:
            detail = f"it speaks protocol {answer.protocol}, this version {PROTOCOL}"
            step = Step("version", False, detail, "install the same version of atomtrain on both")
        elif answer.run != config.run:
            fix = f"write {answer.run}@ before the address"
            step = Step("run", False, f"it trains {answer.run!r}, not {config.run!r}", fix)
        else:
            fix = "give --run-key or --identity as its owner tells you"
            step = Step("admission", False, answer.reason, fix)
        found.steps.append(step)
        return False
    except (LinkLost, BadMessage) as error:
        if circuit is not None:
            fix = "the peer may have other relays now, or be gone: 'atom swarm status' shows it"
            found.steps.append(Step("relay", False, str(error), fix))
            return False
        fix = (
            "something else listens there, or a peer with another key: paste the address that it "
            "prints now"
        )
        found.steps.append(Step("libp2p", False, str(error), fix))
        return False
    found.steps += proved
    found.steps.append(Step("run", True, f"it trains {config.run!r}, and admits this machine"))
    found.steps.append(Step("version", True, f"atomtrain {pong.version}, protocol {PROTOCOL}"))
    return True


async def _measure(probe: Probe, address: str, found: Diagnosis) -> None:
    try:
        pings = [await probe.ping(address) for _ in range(_PINGS)]
        moved_bytes, seconds, until_s = 0, 0.0, time.monotonic() + _RATE_S
        for _ in range(_RATE_PINGS):
            pong, asked_s, came_s = await probe.ping(address, PING_BYTES_MAX)
            moved_bytes += pong.bytes_count
            seconds += came_s - asked_s
            if time.monotonic() >= until_s:
                break
    except (LinkLost, BadMessage) as error:
        fix = "the way is not reliable: try again, and look at the peer's log"
        found.steps.append(Step("measurement", False, str(error), fix))
        return
    found.round_trip_s = statistics.median(came_s - asked_s for _, asked_s, came_s in pings)
    offsets = [pong.time_s - (asked_s + came_s) / 2 for pong, asked_s, came_s in pings]
    found.clock_offset_s = statistics.median(offsets)
    found.bytes_per_s = moved_bytes / seconds
    off_s = abs(found.clock_offset_s)
    # Peers reckon in the swarm's time: a wrong clock does no harm there, but in logs it does.
    detail = f"the swarm's time is {found.clock_offset_s:+.3f} s from this machine's"
    if off_s > _CLOCK_GOOD_S:
        detail += "; peers allow for that, logs do not: set the clock (timedatectl set-ntp true)"
    found.steps.append(Step("clock", True, detail))
