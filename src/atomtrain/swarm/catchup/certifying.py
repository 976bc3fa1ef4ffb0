"""How certificates get around: nobody waits for them, and who wants one asks for it.

Members sign what they have merged, each for itself, and keep what they sign. At each beat a peer
asks members of its own rounds for the signatures that its anchors still lack, and those that claim
something better for the certificate of that. Answers come with whatever signatures there are yet;
the other members that a certificate names are asked for the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.certificate import complete, signers, stamp_of
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import AskCertificate, Certificate, Certificates
from atomtrain.swarm.transport.transport import Channel, LinkLost

_AT_ONCE = 8
"""Questions at a beat, of each kind."""
_TRIES = 8
"""Beats at which members are asked for what the certificate of one anchor lacks."""
_CLAIM_TRIES = 4
"""Times that a peer is asked for the certificate of one claim: who asks for ever comes to the limit
of streams there, see `buckets`, and rounds do not get through either."""


class _Question(NamedTuple):
    peer_id: str
    fragment: int
    digest: str


class Certifier:
    """Asks for certificates; on one event loop."""

    def __init__(self, context: Context) -> None:
        """Ask for one peer."""
        self._context = context
        self.looking = False
        """Questions are under way."""
        self._turn = 0
        self._tries: dict[tuple[int, str], int] = {}
        """By fragment and digest of this peer's own anchors."""
        self._claims_asked: dict[_Question, int] = {}
        """By claim of others: how often its peer was asked for the certificate."""

    async def look(self) -> None:
        """Ask once for what this peer's own anchors lack, and for what others claim to have."""
        self.looking = True
        self._turn += 1
        try:
            await asyncio.gather(*map(self._ask, self._own()))
            claimed = self._claimed()
            await asyncio.gather(*map(self._ask, claimed))
            found = {(q.fragment, q.digest) for q in claimed}
            told = (self._context.certified.of(*which) for which in found)
            await asyncio.gather(*(self.fill(c) for c in told if c is not None))
        finally:
            self.looking = False

    async def fill(self, certificate: Certificate) -> None:
        """Ask members that a certificate names, and that answer, for the signatures it lacks."""
        if not complete(certificate):
            lacking = self._lacking(certificate)
            fragment, digest = certificate.fragment, certificate.digest
            await asyncio.gather(*(self._ask(_Question(p, fragment, digest)) for p in lacking))

    def _own(self) -> list[_Question]:
        """Return whom to ask for signatures under this peer's own anchors, one each.

        Not at the first beat: what the next round replaces at once is not worth asking for.
        """
        certified = self._context.certified
        found: list[_Question] = []
        tries: dict[tuple[int, str], int] = {}
        for fragment, stamp in enumerate(self._context.mailbox.store.stamps()):
            if stamp is None:
                continue
            certified.hold(fragment, stamp.digest)
            c = certified.of(fragment, stamp.digest)
            if c is None or complete(c) or len(found) == _AT_ONCE:
                continue
            key = fragment, c.digest
            tries[key] = self._tries.get(key, -1) + 1
            lacking = self._lacking(c)
            if lacking and 0 < tries[key] <= _TRIES:
                found.append(_Question(lacking[tries[key] % len(lacking)], *key))
        self._tries = tries
        return found

    def _claimed(self) -> list[_Question]:
        """Return whom to ask for certificates of what is better than this peer's own."""
        roster = self._context.roster
        stamps = self._context.mailbox.store.stamps()
        claimed = sorted(
            _Question(record.peer_id, fragment, stamp.digest)
            for record in roster.others
            for fragment, (stamp, own) in enumerate(zip(record.stamps, stamps, strict=True))
            if stamp is not None
            and own is not None
            and self._context.claims.keeps(record.peer_id)
            and not roster.certain(record.peer_id, fragment, stamp, own)
        )
        asked = {question: self._claims_asked.get(question, 0) for question in claimed}
        found = [question for question in claimed if asked[question] < _CLAIM_TRIES]
        first = self._turn * _AT_ONCE % len(found) if len(found) > _AT_ONCE else 0
        chosen = (found + found)[first : first + min(_AT_ONCE, len(found))]
        self._claims_asked = asked | {question: asked[question] + 1 for question in chosen}
        return chosen

    def _lacking(self, c: Certificate) -> list[str]:
        roster, me = self._context.roster, self._context.peer_id
        missing = (m for m in c.members if m not in signers(c) and m != me)
        return [member for member in missing if roster.answers(member)]

    async def _ask(self, question: _Question) -> None:
        peer_id, fragment, digest = question
        try:
            channel = await self._context.open(peer_id)
        except LinkLost:
            return
        try:
            ask = AskCertificate(fragment=fragment, digest=digest)
            answer = await self._context.ask(channel, ask, Certificates)
        except (LinkLost, BadMessage):
            return
        finally:
            channel.close()
        self._take(fragment, digest, answer.chain)

    def _take(self, fragment: int, digest: str, chain: Iterable[Certificate]) -> None:
        """Take an anchor's certificate, and those of the ones before it; nothing else."""
        limit, linked = self._context.age.limit, []
        for c in chain:
            if (c.fragment, c.digest) != (fragment, digest) or limit.refusal(stamp_of(c)):
                break
            linked.append(c)
            digest = c.parent
        for c in reversed(linked):  # the earliest first: a jump shows at the one after it
            self._context.certified.add(c)


async def send_certificates(channel: Channel, context: Context, ask: AskCertificate) -> None:
    """Answer `AskCertificate`."""
    await channel.send(Certificates(chain=context.certified.chain(ask.fragment, ask.digest)))
