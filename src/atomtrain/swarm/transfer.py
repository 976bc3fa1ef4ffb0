"""Whole anchors and the manifest, from a peer that has them to one that needs them."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm.admission import Admission
from atomtrain.swarm.anchors import (
    Anchor,
    Merge,
    Origin,
    Part,
    Snapshot,
    Stamp,
    digest_of,
    split_parts,
    whole,
)
from atomtrain.swarm.codec import byte_view
from atomtrain.swarm.config import MANIFEST_BYTES_MAX, PROTOCOL, Manifest
from atomtrain.swarm.context import Context
from atomtrain.swarm.messages import (
    AnchorHeader,
    AskAnchor,
    AskManifest,
    BadMessage,
    ManifestHeader,
    Open,
)
from atomtrain.swarm.slices import Span
from atomtrain.swarm.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_RETRY_S = 0.5


class NotAdmitted(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """The peer that was asked for its manifest is not one that this peer admits."""


async def send_manifest(channel: Channel, manifest: Manifest, admission: Admission) -> None:
    """Answer `AskManifest`."""
    data = manifest.encode()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    proof = admission.proof(channel.remote)
    await channel.send(ManifestHeader(bytes_count=len(data), digest=digest, proof=proof))
    await channel.send_bytes(data)


async def ask_manifest(channel: Channel, admission: Admission, within_s: float) -> Manifest:
    """Return the run's manifest, asked for on a fresh stream from a peer that is admitted.

    Raises:
        LinkLost: the peer is gone, or refused.
        SwarmError: it is not admitted here.
        BadMessage: what came is not what was announced.
    """
    proof = admission.proof(channel.remote)
    await channel.send(Open(protocol=PROTOCOL, run=admission.run, proof=proof))
    await channel.send(AskManifest())
    header = await channel.receive(ManifestHeader, within_s)
    if refusal := admission.refusal(channel.remote, header.proof):
        raise NotAdmitted(refusal)
    if header.bytes_count > MANIFEST_BYTES_MAX:
        raise BadMessage(f"a manifest of {header.bytes_count} bytes")
    data = bytearray(header.bytes_count)
    await channel.receive_into(memoryview(data))
    if hashlib.blake2b(data, digest_size=16).hexdigest() != header.digest:
        raise BadMessage("the manifest is damaged: wrong hash")
    return Manifest.decode(bytes(data))


async def send_anchor(channel: Channel, fragment: int, anchor: Anchor) -> None:
    """Answer `AskAnchor`."""
    parts = anchor.origin.parts
    members = sorted(frozenset().union(*(part.contributors for part in parts)))
    header = AnchorHeader(
        fragment=fragment,
        version=anchor.stamp.version,
        tokens=anchor.stamp.tokens,
        digest=anchor.stamp.digest,
        round_id=anchor.origin.round_id,
        members=tuple(members),
        starts=tuple(part.span.start for part in parts),
        stops=tuple(part.span.stop for part in parts),
        contributors=tuple(
            " ".join(str(i) for i, m in enumerate(members) if m in part.contributors)
            for part in parts
        ),
    )
    await channel.send(header)
    await channel.send_bytes(byte_view(anchor.values))
    if anchor.velocity is not None:
        await channel.send_bytes(byte_view(anchor.velocity))


async def ask_anchor(context: Context, peer_id: str, fragment: int) -> tuple[Anchor, int]:
    """Return a peer's anchor, checked against its hash, and the bytes that it took.

    Raises:
        LinkLost: the peer is gone, or refused.
        BadMessage: what came is not what was announced, or not finite.
    """
    channel = await context.open(peer_id)
    try:
        await channel.send(AskAnchor(fragment=fragment))
        header = await channel.receive(AnchorHeader, context.config.stall_s)
        if header.fragment != fragment:
            raise BadMessage(f"peer {peer_id[-8:]} sent fragment {header.fragment}")
        elements = context.manifest.fragment_elements[fragment]
        origin = _origin(header, elements)
        values = torch.empty(elements)
        await channel.receive_into(byte_view(values))
        velocity = None
        if context.desk.store.momentum:
            velocity = torch.empty(elements)
            await channel.receive_into(byte_view(velocity))
        if await context.offload(digest_of, values, velocity) != header.digest:
            raise BadMessage(f"fragment {fragment} of peer {peer_id[-8:]} has the wrong hash")
        stamp = Stamp(header.version, header.tokens, header.digest)
        return Anchor(values, velocity, stamp, origin), channel.received_bytes
    finally:
        channel.close()


def _origin(header: AnchorHeader, elements: int) -> Origin:
    parts = []
    try:
        for start, stop, text in zip(header.starts, header.stops, header.contributors, strict=True):
            if not 0 <= start <= stop <= elements:
                raise ValueError("span outside the fragment")
            names = frozenset(header.members[int(i)] for i in text.split())
            parts.append(Part(Span(start, stop), names))
    except (ValueError, IndexError) as error:
        raise BadMessage(f"an anchor's origin cannot be read: {error}") from error
    return Origin(header.round_id, tuple(parts))


class Fetcher:
    """Gets anchors from whoever has them, falling over to the next donor when one fails."""

    def __init__(self, context: Context) -> None:
        """Fetch for one peer."""
        self._context = context

    async def fetch(self, fragment: int, patience_s: float) -> tuple[Anchor, int]:
        """Return the best anchor of a fragment that any peer gives, and the bytes it took.

        Donors that fail are not asked again until their next record; while there is none to ask,
        the membership records are read again.

        Raises:
            SwarmError: no donor gave it within `patience_s`; a transfer under way is not cut off.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        why = "no peer has it"
        while True:
            for donor in self._context.roster.holders(fragment):
                try:
                    return await ask_anchor(self._context, donor, fragment)
                except (LinkLost, BadMessage) as error:
                    why = str(error)
                    _log.info("fetching fragment %d: %s; trying another peer", fragment, error)
                    self._context.roster.suspect(donor)
            if loop.time() >= until_s:
                raise SwarmError(
                    f"fragment {fragment} of run {self._context.config.run!r} could not be fetched "
                    f"from any peer within {patience_s:.0f} s: {why}; join again when a peer that "
                    "trains is reachable"
                )
            await asyncio.sleep(_RETRY_S)
            self._context.roster.update(await self._context.directory.records())


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
