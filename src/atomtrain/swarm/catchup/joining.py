"""How a newcomer finds its way in: through whichever of the given addresses leads to its run.

Who is there gives the run's manifest, and the swarm's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable
from typing import NamedTuple

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.membership.admission import NEEDS_KEY, Admission
from atomtrain.swarm.membership.config import MANIFEST_BYTES_MAX, PROTOCOL, Manifest, SwarmConfig
from atomtrain.swarm.membership.directory import SwarmClock
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.addresses import dialled, first_hop
from atomtrain.swarm.transport.libp2p import Libp2pTransport, peer_of
from atomtrain.swarm.transport.messages import AskManifest, ManifestHeader, Open
from atomtrain.swarm.transport.transport import Channel, LinkLost, PeerRefused

_MORE_S = 0.5
"""How long others are waited for when one peer has answered."""
_CLOCK_GOOD_S, _ASKED = 0.5, 3
"""A clock measured less exactly is measured again, and the best of so many counts: records expire
by it, and either peer may have stood still meanwhile."""
_SILENT_S, _AGAIN_S = 45.0, 0.5
"""Who is reached, and so is known to be the one that is meant, but does not answer stands still:
it is asked for so long, with such pauses."""


class WrongKeyError(SwarmError):
    """The run is there, and none of its peers that answered admits one without its key."""


class NotAdmitted(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """The peer that was asked for its manifest is not one that this peer admits."""


class WayIn(NamedTuple):
    """What a newcomer learns from the peers that answer."""

    manifest: Manifest
    clock: SwarmClock
    """The swarm's time."""
    through: tuple[str, ...]
    """The addresses that led to the run."""


async def connect_any(
    transport: Libp2pTransport, config: SwarmConfig, admission: Admission
) -> WayIn:
    """Try all given addresses at once, and those of the peers that the run is known to have had.

    Raises:
        WrongKeyError: none led to the run, and a peer of it asked for another key.
        SwarmError: none led to the run; one line that says for each given address why. Or those
            that did tell different things of it.
    """
    given: dict[str, list[str]] = {}
    # Who is behind a relay is in the run that the relay is in: the relay lets newcomers in.
    joins = [first_hop(address) for address in config.join]
    for address in joins:
        given.setdefault(peer_of(address), []).append(address)
    seen = KnownPeers(config.run, config.peers_path).addresses
    known = {peer_id: straight for peer_id, all_ in seen.items() if (straight := dialled(all_))}
    places = {peer_id: [*given.get(peer_id, ()), *known.get(peer_id, ())] for peer_id in
              (*given, *known)}  # fmt: skip
    tries = {
        asyncio.create_task(_try(transport, config, admission, peer_id, addresses)): addresses[0]
        for peer_id, addresses in places.items()
    }
    try:
        answers = await _first_answers(tries)
    finally:
        for task in tries:
            task.cancel()
    ways = [(a, tries[task]) for task, a in answers.items() if not isinstance(a, str)]
    if not ways:
        if asking := [a for a in answers.values() if isinstance(a, str) and NEEDS_KEY in a]:
            raise WrongKeyError(f"cannot join run {config.run!r}: {asking[0]}")
        told = [str(answer) for task, answer in answers.items() if tries[task] in joins]
        if len(places) > len(given):
            none = "none of the other peers" if told else "none of the peers"
            told.append(f"{none} in {config.peers_path} answered")
        raise SwarmError(f"cannot join run {config.run!r}: " + "; ".join(told))
    asked = [way for way in ways if way[1] in joins] or ways
    digest = _agreed(config.run, asked)
    ways = [way for way in ways if way[0][0].digest == digest]
    clocks = sorted((way[0] for way in asked if way in ways), key=lambda told: told[1].offset_s)
    manifest, clock = clocks[(len(clocks) - 1) // 2]
    return WayIn(manifest, clock, tuple(address for _, address in ways))


_Answer = tuple[Manifest, SwarmClock] | str
_Way = tuple[tuple[Manifest, SwarmClock], str]
"""What a peer has told, and its address."""


def _agreed(run: str, ways: list[_Way]) -> str:
    """Return the hash of the manifest that more than half of these peers tell.

    Raises:
        SwarmError: there is none.
    """
    told: dict[str, list[_Way]] = {}
    for way in ways:
        told.setdefault(way[0][0].digest, []).append(way)
    most = max(told.values(), key=len)
    if 2 * len(most) <= len(ways):
        different = ", ".join(same[0][1] for same in told.values())
        raise SwarmError(
            f"cannot join run {run!r}: the peers at {different} tell different things of what the "
            "run is, and this peer could not tell who is right; name the address of one that you "
            "trust"
        )
    return most[0][0][0].digest


async def _first_answers(
    tries: Iterable[asyncio.Task[_Answer]],
) -> dict[asyncio.Task[_Answer], _Answer]:
    """Return the answers of all, or of those that come soon after the first that leads in."""
    waiting = set(tries)
    answers: dict[asyncio.Task[_Answer], _Answer] = {}
    left_s: float | None = None
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        answers.update((task, task.result()) for task in done)
        if not done:
            break
        if left_s is None and any(not isinstance(answer, str) for answer in answers.values()):
            left_s = _MORE_S
    return answers


async def _try(
    transport: Libp2pTransport,
    config: SwarmConfig,
    admission: Admission,
    peer_id: str,
    addresses: list[str],
) -> _Answer:
    """Return the manifest and the swarm's time, or why there is none at these addresses."""
    address = addresses[0]
    if peer_id == transport.peer_id:
        return f"{address} is this peer's own"
    transport.learn(peer_id, addresses)
    try:
        best = await _ask_patiently(transport, config, admission, peer_id)
        with contextlib.suppress(LinkLost, BadMessage, TimeoutError):
            for _ in range(_ASKED - 1):
                if best[1].error_s <= _CLOCK_GOOD_S:
                    break
                again = await _ask(transport, config, admission, peer_id)
                best = min(best, again, key=lambda found: found[1].error_s)
        return best
    except PeerRefused as refusal:
        answer = refusal.answer
        if answer.protocol != PROTOCOL:
            return (
                f"the peer at {address} speaks protocol {answer.protocol}, this one {PROTOCOL}: "
                "install the same version of atomtrain"
            )
        if answer.run == config.run:
            return f"the peer at {address} turns this one away: {answer.reason}"
        return (
            f"the peer at {address} trains run {answer.run!r}; use that name, "
            f"or an address of a peer that trains {config.run!r}"
        )
    except NotAdmitted as error:
        return (
            f"the peer at {address} is none that this one admits, though it trains run "
            f"{config.run!r} ({error}); check the address, --run-key and --allow"
        )
    except BadMessage as error:
        return f"what answers at {address} is no ATOM peer of this version ({error})"
    except _Silent as error:
        return (
            f"the peer at {address} is reached, but has not answered for {_SILENT_S:.0f} s "
            f"({error}); see whether its machine stands still, and try again"
        )
    except (LinkLost, TimeoutError):
        return (
            f"no peer answers at {address} within {config.endpoint.connect_s:.0f} s; check that it "
            "runs, that address and port are right, and that no firewall is between"
        )


class _Silent(LinkLost):
    """A peer was reached, and did not answer."""


async def _ask_patiently(
    transport: Libp2pTransport, config: SwarmConfig, admission: Admission, peer_id: str
) -> tuple[Manifest, SwarmClock]:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _SILENT_S
    while True:
        try:
            return await _ask(transport, config, admission, peer_id)
        except _Silent:
            if loop.time() >= until_s:
                raise
        await asyncio.sleep(_AGAIN_S)


async def _ask(
    transport: Libp2pTransport, config: SwarmConfig, admission: Admission, peer_id: str
) -> tuple[Manifest, SwarmClock]:
    async with asyncio.timeout(config.endpoint.connect_s):
        channel = await transport.open(peer_id)
    try:
        return await ask_manifest(channel, admission, config.endpoint.connect_s)
    except PeerRefused:
        raise
    except LinkLost as error:
        raise _Silent(str(error)) from error
    finally:
        channel.close()


async def send_manifest(channel: Channel, context: Context) -> None:
    """Answer `AskManifest`."""
    data = context.manifest.encode()
    header = ManifestHeader(
        bytes_count=len(data),
        digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
        proof=context.admission.proof(channel.remote),
        time_s=context.clock(),
    )
    await channel.send(header)
    await channel.send_bytes(data)


async def ask_manifest(
    channel: Channel, admission: Admission, within_s: float
) -> tuple[Manifest, SwarmClock]:
    """Return the run's manifest and its time, asked for on a fresh stream.

    Raises:
        LinkLost: the peer is gone, or refused.
        SwarmError: it is not admitted here.
        BadMessage: what came is not what was announced.
    """
    proof = admission.proof(channel.remote)
    await channel.send(Open(protocol=PROTOCOL, run=admission.run, proof=proof))
    asked_s = time.time()
    await channel.send(AskManifest())
    header = await channel.receive(ManifestHeader, within_s)
    clock = SwarmClock.measured(asked_s, header.time_s, time.time())
    if refusal := admission.refusal(channel.remote, header.proof):
        raise NotAdmitted(refusal)
    if header.bytes_count > MANIFEST_BYTES_MAX:
        raise BadMessage(f"a manifest of {header.bytes_count} bytes")
    data = bytearray(header.bytes_count)
    await channel.receive_into(memoryview(data))
    if hashlib.blake2b(data, digest_size=16).hexdigest() != header.digest:
        raise BadMessage("the manifest is damaged: wrong hash")
    return Manifest.decode(bytes(data)), clock
