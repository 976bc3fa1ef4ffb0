"""The manifest, from a peer that has it to a newcomer; and what a fetched anchor changes."""

from __future__ import annotations

import hashlib
import time

from atomtrain.errors import SwarmError
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot, split_parts, whole
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.config import MANIFEST_BYTES_MAX, PROTOCOL, Manifest
from atomtrain.swarm.membership.directory import SwarmClock
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import AskManifest, BadMessage, ManifestHeader, Open
from atomtrain.swarm.transport.transport import Channel


class NotAdmitted(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """The peer that was asked for its manifest is not one that this peer admits."""


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


def merge_of_fetched(
    fragment: int, anchor: Anchor, present: Anchor, doubt: tuple[str, Snapshot] | None, me: str
) -> Merge:
    """Return how to merge a fetched anchor.

    `doubt` is the id and snapshot of a round whose decision this peer did not hear. If that round
    made the fetched anchor out of the present one, progress is measured from the snapshot wherever
    this peer's contribution is in it.
    """
    elements = anchor.values.numel()
    if doubt is None or anchor.origin.round_id != doubt[0] or doubt[1].anchor is not present:
        return Merge(fragment, anchor, whole(elements))
    changed, contributed = split_parts(anchor.origin.parts, me)
    return Merge(fragment, anchor, changed, doubt[1], contributed)
