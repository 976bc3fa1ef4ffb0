"""What a peer tells those who look on: the swarm as it knows it, and how good the way here is."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from atomtrain.swarm.codecs.slices import slices_per_member
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.node.round_loop import Group
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import BadMessage, Ping, Pong, StatusHeader
from atomtrain.swarm.transport.transport import Channel

STATUS_BYTES_MAX = 32 << 20
PING_BYTES_MAX = 4 << 20
_ZEROS = bytes(1 << 18)


def _version() -> str:
    return importlib.metadata.version("atomtrain")


def status_of(context: Context, groups: Sequence[Group]) -> dict[str, Any]:
    """Return what this peer knows of its swarm, JSON-able."""
    best = context.desk.store.stamps()
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
        "relaying": context.ways.relay.status(),
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
        BadMessage: what came is no status.
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
    if not isinstance(status, dict):
        raise BadMessage("the status is not an object")
    return status


async def send_pong(channel: Channel, context: Context, ping: Ping) -> None:
    """Answer `Ping`, with as many bytes as were asked for, and 4 MiB at most."""
    count = min(ping.bytes_count, PING_BYTES_MAX)
    await channel.send(Pong(time_s=context.clock(), version=_version(), bytes_count=count))
    for start in range(0, count, len(_ZEROS)):
        await channel.send_bytes(memoryview(_ZEROS)[: count - start])
