"""What a peer may do wrong with what it sends at one stage of a round, and a record of its rounds.

`Misdeed` is done to the first thing that the process sends to another peer after it has come to a
stage, in every round, for as long as the test wants it. `record` has a peer tell its contributions
and what its anchors became, so that a test can do the sums again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import random
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atombench.liars.misdeeds import CLAIMS, claim
from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm import Swarm
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.transport import messages
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.messages import (
    MESSAGE_BYTES_MAX,
    AskAnchor,
    AskKnown,
    AskManifest,
    AskStatus,
    Contribution,
    HoldOn,
    Invite,
    Message,
    Ping,
    Propose,
    Proposed,
    RelayTo,
)
from atomtrain.swarm.transport.transport import Channel
from tests.support import swarm_vectors
from tests.support.swarm_vectors import say

PLAUSIBLE = ("a little better", "the lower hash")
"""Claims that nobody can tell from the truth by their numbers; the values are random ones."""
LIES = tuple(what for what in CLAIMS if what not in PLAUSIBLE)
NEARLY = 0.19
"""By which numbers are off that raise the loss of the vectors of these tests by 0.036, which is
less than the usual margin."""
MISDEEDS = ("corrupt", "replay", "flood", "slow")
FLOOD = 2000
"""Copies that a flood sends of one message or piece of data."""
SLOW_S = 2.0
"""Less than any deadline: who is slow is not dead."""
DRIP_S = 0.3
"""From one byte to the next: an anchor of these tests takes an hour."""
RAIDERS = 160
"""Streams that a raid opens to each victim at once: more than it serves to one peer."""
HOARDED = 16
"""Streams on which a hoarder has asked each victim for an anchor, and takes nothing."""
_LARGEST = 2**53 - 1


class Misdeed:
    """Spoils what this process sends, once each time that it is told to."""

    def __init__(self, what: str, swarm: Swarm) -> None:
        """Begin to listen: a replay takes what was sent before."""
        self._what, self._own_id = what, swarm.peer_id
        self._agenda = swarm._service.context.agenda
        self._last: dict[Channel, str] = {}
        self._first: dict[str, bytes] = {}
        self._now = False
        self._send_bytes = Channel.send_bytes
        misdeed = self

        async def send_bytes(channel: Channel, data: bytes | memoryview) -> None:
            await misdeed._sent(channel, data)

        Channel.send_bytes = send_bytes  # type: ignore[method-assign]

    def arm(self) -> None:
        """Do it to what is sent next; from any thread."""
        self._now = True

    async def _sent(self, channel: Channel, data: bytes | memoryview) -> None:
        if channel.remote == self._own_id:  # what it says to itself as a leader harms nobody else
            await self._send_bytes(channel, data)
            return
        plain = bytes(data)
        kind = self._kind(channel, plain)
        old = self._first.setdefault(kind, plain)
        if not self._now:
            await self._send_bytes(channel, data)
            return
        self._now = False
        contribution = kind.startswith("contribution")
        say("misdeed", sent=kind, round=self._agenda.running if contribution else None)
        if self._what == "corrupt":
            plain = random.randbytes(len(plain))
        elif self._what == "replay":
            plain = old
        elif self._what == "slow":
            await asyncio.sleep(SLOW_S)
        for _ in range(FLOOD if self._what == "flood" else 1):
            await self._send_bytes(channel, plain)

    def _kind(self, channel: Channel, data: bytes) -> str:
        """Return of what kind a message is, or of what, and how long, raw data are."""
        try:
            if len(data) > 4 and struct.unpack(">I", data[:4])[0] == len(data) - 4:
                kind = type(messages.decode(data[4:])).__name__
                self._last[channel] = kind
                return kind
        except BadMessage:
            pass
        # On a lane all contributions come first, and each mean after a header of its own.
        last = self._last.get(channel, Contribution.__name__)
        return f"{'contribution' if last == Contribution.__name__ else last} of {len(data)} bytes"


def withhold(swarm: Swarm, *, signed: bool) -> None:
    """Have a peer claim a version more of every fragment, and give it to nobody.

    If it is `signed`, the peer has a certificate, too: of itself and identities of its own.
    """
    service = swarm._service
    identities = [service.context.transport.identity, *(Identity.create() for _ in range(4))]

    async def send(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
        say("withheld", to=channel.remote)
        await asyncio.sleep(1e6)

    def of(fragment: int, digest: str) -> Any:
        from atomtrain.swarm.anchors.certificate import signed_text, unsigned, with_signature

        certificate = unsigned(
            fragment, store.anchor(fragment).stamp, "", [one.peer_id for one in identities]
        )
        text = signed_text(service.context.certified._run, certificate)
        for one in identities:
            certificate = with_signature(certificate, one.peer_id, one.sign(text).hex())
        return certificate

    store = service.context.mailbox.store
    claim(store, "a little better")
    service._donations.send = send  # type: ignore[method-assign]
    if signed:
        service.context.certified.of = of  # type: ignore[method-assign]


def conspire(swarm: Swarm, ally: str) -> None:
    """Have a peer make rounds with one other only, and claim a hundred times its tokens in them."""
    both, rounds = {swarm.peer_id, ally}, swarm._service._rounds
    follow, seen = rounds.follow, Roster.others.fget
    assert seen is not None

    async def follow_ally(channel: Channel, invite: Invite) -> bool:
        return channel.remote in both and await follow(channel, invite)

    rounds.follow = follow_ally  # type: ignore[method-assign]
    Roster.others = property(  # type: ignore[assignment,method-assign]
        lambda roster: [record for record in seen(roster) if record.peer_id in both]
    )
    swarm_vectors.TOKENS_A_STEP *= 100


def mute(swarm: Swarm, file: Path) -> None:
    """Have a peer take questions for its anchors, and not answer as long as there is a file."""
    service = swarm._service
    answer = service._answer_question

    async def hang(channel: Channel, message: Message) -> None:
        if isinstance(message, AskKnown | AskAnchor):
            say("asked", by=channel.remote)
            while file.exists():
                await asyncio.sleep(0.05)
        await answer(channel, message)

    service._answer_question = hang  # type: ignore[method-assign]


def drip(swarm: Swarm) -> None:
    """Have a peer send others all that it sends byte by byte, each well within any deadline."""
    send, me = Channel.send_bytes, swarm.peer_id

    async def send_bytes(channel: Channel, data: bytes | memoryview) -> None:
        if channel.remote == me:
            await send(channel, data)
            return
        say("dripped", to=channel.remote, bytes=len(data))
        for byte in bytes(data):
            await send(channel, bytes([byte]))
            await asyncio.sleep(DRIP_S)

    Channel.send_bytes = send_bytes  # type: ignore[method-assign]


def haunt(swarm: Swarm) -> None:
    """Have a peer accept every invitation and every proposal, and do nothing about it."""
    rounds = swarm._service._rounds

    async def follow(channel: Channel, invite: Invite) -> bool:
        say("invited", round=invite.round_index)
        await asyncio.sleep(1e6)
        return False

    async def consider(proposer: str, message: Propose) -> Proposed:
        return Proposed(accepted=True, round_index=message.round_index, reason="")

    rounds.follow = follow  # type: ignore[method-assign]
    rounds.consider = consider  # type: ignore[method-assign]
    rounds.on_boundary = lambda steps: None  # type: ignore[method-assign]


def haunt_with(swarm: Swarm, ghosts: int) -> None:
    """Write membership records of peers that are not there, again and again.

    Where they say that they are, connections are taken and nothing is ever said on them.
    """
    context = swarm._service.context
    server = socket.create_server(("127.0.0.1", 0), backlog=4 * ghosts)
    port = server.getsockname()[1]

    async def renew(ghost: Identity) -> None:
        directory = copy.copy(context.directory)
        directory._identity = ghost  # type: ignore[attr-defined]
        place = f"/ip4/127.0.0.1/tcp/{port}/p2p/{ghost.peer_id}"
        while True:
            record = replace(
                swarm._service.own_record(), peer_id=ghost.peer_id, addresses=(place,),
                sequence=context.clock(),
            )  # fmt: skip
            sealed = context.admission.seal(record.encode())
            with contextlib.suppress(SwarmError):
                await directory.publish(sealed, context.config.expiry_s)
            await asyncio.sleep(context.config.expiry_s / 2)

    async def appear() -> None:
        try:
            await asyncio.gather(*(renew(Identity.create()) for _ in range(ghosts)))
        finally:
            server.close()

    swarm._thread.submit(appear())


def record(swarm: Swarm) -> None:
    """Have a peer tell of each round what it contributed, and what its anchor became by it."""
    service = swarm._service
    store = service.context.mailbox.store

    def snapshot(fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
        taken = type(store).snapshot(store, fragment, local, into)
        change = taken.values - taken.anchor.values
        say("took", round=service.context.agenda.running, change=change.tolist())
        return taken

    def merge(what: Merge, local: torch.Tensor) -> None:
        before = store.anchor(what.fragment).values.tolist()
        origin, weights = what.anchor.origin, dict[str, int]()
        for one in service._rounds.groups():
            if one.invite.round_id == origin.round_id:
                weights = dict(zip(one.begin.members, one.begin.weights, strict=True))
        type(store).merge(store, what, local)
        if what.snapshot is not None and weights:
            say(
                "merged",
                round=origin.round_id,
                weights=weights,
                parts=[(*part.span, sorted(part.contributors)) for part in origin.parts],
                before=before,
                after=what.anchor.values.tolist(),
            )

    store.snapshot = snapshot  # type: ignore[method-assign]
    store.merge = merge  # type: ignore[method-assign]


def check_means(said: dict[str, list[dict[str, Any]]]) -> int:
    """Check each mean that contains nothing but what its contributors noted; return how many.

    `said`: what each peer has told, by its id. In rounds in which a peer spoiled a contribution,
    what it noted is not what it sent.
    """
    took = {
        (peer, line["round"]): line["change"]
        for peer, lines in said.items()
        for line in lines
        if line["kind"] == "took"
    }
    spoiled = {
        (peer, line["round"])
        for peer, lines in said.items()
        for line in lines
        if line["kind"] == "misdeed"
    }
    checked = 0
    for line in (line for lines in said.values() for line in lines if line["kind"] == "merged"):
        for start, stop, contributors in line["parts"]:
            if any((peer, line["round"]) in spoiled for peer in contributors):
                continue
            weights = line["weights"]
            total = sum(weights[peer] for peer in contributors)
            before, after = (torch.tensor(line[of][start:stop]) for of in ("before", "after"))
            change = torch.zeros_like(before)
            for peer in contributors:
                one = torch.tensor(took[peer, line["round"]][start:stop])
                change += one * (weights[peer] / total)
            torch.testing.assert_close(after, before + change, rtol=1e-5, atol=1e-6)
            checked += 1
    return checked


def raid(swarm: Swarm) -> None:
    """Have others allocate as much as they will, in every way at once, and keep it."""
    context = swarm._service.context
    kept: list[Channel] = []

    async def go_on(victim: str, number: int) -> None:
        for turn in itertools.count(number):
            try:
                channel = await context.open(victim, bulk=turn % 3 == 0)
            except SwarmError:
                await asyncio.sleep(0.2)
                continue
            kept.append(channel)
            with contextlib.suppress(SwarmError):
                async with asyncio.timeout(3.0):
                    await _RAIDS[turn % len(_RAIDS)](channel, context.agenda.running or "")
                    say("raided", way=_RAIDS[turn % len(_RAIDS)].__name__)
            await asyncio.sleep(1.0)
            channel.close()
            kept.remove(channel)

    async def spread() -> None:
        others = [peer for peer in context.roster.members if peer != context.peer_id]
        await asyncio.gather(*(go_on(peer, n) for peer in others for n in range(RAIDERS)))

    swarm._thread.submit(spread())


def hoard(swarm: Swarm) -> None:
    """Ask others for anchors again and again, take a little, and keep the streams."""
    context = swarm._service.context

    async def go_on(victim: str) -> None:
        kept: list[Channel] = []
        for turn in itertools.count():
            with contextlib.suppress(SwarmError):
                channel = await context.open(victim, bulk=True)
                await channel.send(AskAnchor(fragment=turn % 2, digest="", start_bytes=0))
                kept.append(channel)
                say("hoarded", streams=len(kept))
            if len(kept) > HOARDED:
                kept.pop(0).close()
            await asyncio.sleep(0.3)

    async def spread() -> None:
        others = [peer for peer in context.roster.members if peer != context.peer_id]
        await asyncio.gather(*map(go_on, others))

    swarm._thread.submit(spread())


async def _announce_much(channel: Channel, running: str) -> None:
    await channel.send_bytes(struct.pack(">I", 2**32 - 1) + bytes(1 << 20))


async def _announce_and_keep_back(channel: Channel, running: str) -> None:
    await channel.send_bytes(struct.pack(">I", MESSAGE_BYTES_MAX) + bytes(MESSAGE_BYTES_MAX - 1))


async def _nest(channel: Channel, running: str) -> None:
    data = b'{"kind": "Open", "run": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    await channel.send_bytes(struct.pack(">I", len(data)) + data)


async def _list(channel: Channel, running: str) -> None:
    data = b'{"kind": "Begin", "weights": [' + b"{}," * 300_000 + b"{}]}"
    await channel.send_bytes(struct.pack(">I", len(data)) + data)


async def _ask_for_much(channel: Channel, running: str) -> None:
    await channel.send(Ping(bytes_count=_LARGEST))


async def _ask_for_anchors(channel: Channel, running: str) -> None:
    await channel.send(AskAnchor(fragment=random.randrange(2), digest="", start_bytes=0))


async def _ask_for_manifest(channel: Channel, running: str) -> None:
    await channel.send(random.choice((AskManifest(), AskStatus(), HoldOn())))


async def _contribute(channel: Channel, running: str) -> None:
    """A codec is sent what says nothing of its size, or that it is large; whatever it decodes."""
    await channel.send(
        Contribution(round_id=running, lane=random.randrange(8), group="", commitments=())
    )
    data = random.choice((b"\xff", b"\0")) * (1 << 20)
    await channel.send_bytes(data + random.randbytes(1 << 20))


async def _invite(channel: Channel, running: str) -> None:
    index = random.choice((1, 10**6, _LARGEST))
    mine = channel.remote[-8:]
    await channel.send(
        Invite(
            round_id=f"{index}-{mine}-1", round_index=index, fragment=index % 2, version=_LARGEST,
            slack=_LARGEST, answer_s=1e9,
        )
    )  # fmt: skip


async def _propose(channel: Channel, running: str) -> None:
    await channel.send(Propose(round_index=random.choice((1, _LARGEST))))


async def _relay(channel: Channel, running: str) -> None:
    await channel.send(RelayTo(peer_id="x" * 10_000, bulk=True))
    await channel.send_bytes(bytes(1 << 20))


_RAIDS = (
    _announce_much, _announce_and_keep_back, _nest, _list, _ask_for_much, _ask_for_anchors,
    _ask_for_manifest, _contribute, _invite, _propose, _relay,
)  # fmt: skip
