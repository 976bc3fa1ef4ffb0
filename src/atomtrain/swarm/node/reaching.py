"""Whether others can dial this peer, as they find out for it.

No peer can tell by itself: a NAT lets everything out. So it asks some others to dial its address
anew. Whoever is in the same local network may get through where the rest does not, so few "no"s
count: then the peer looks for relays. It can still be dialled by those that got through. But one
"no" against two that say "yes" may be a lie, or trouble of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass

from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import AskDial, BadMessage, Dialled
from atomtrain.swarm.transport.transport import LinkLost

_log = logging.getLogger("atomtrain.swarm")
_ASKED, _AT_ONCE = 8, 3
_AGAIN_YES_S, _AGAIN_NO_S = 300.0, 60.0
_AGAIN_SILENT_S = 10.0
_BELIEVED = 2
"""What so many say is believed, whatever others say."""


@dataclass(frozen=True)
class _Answer:
    answered: bool | None
    """None: the peer that was asked did not say."""
    at_s: float

    @property
    def lasts_s(self) -> float:
        if self.answered is None:
            return _AGAIN_SILENT_S
        return _AGAIN_YES_S if self.answered else _AGAIN_NO_S


class Reach:
    """What others found out; asked for by a task of the service."""

    def __init__(self, context: Context) -> None:
        """Know nothing yet."""
        self._context = context
        self._answers: dict[str, _Answer] = {}
        self.needs_relays = False
        """Whether this peer cannot be dialled by everybody, as far as others said."""
        self._local = context.transport.is_local

    @property
    def can_be_dialled(self) -> bool:
        """Whether somebody dialled this peer, and others did not fail to."""
        return self._local or (any(self._said()) and not self._is_hidden())

    def _said(self) -> list[bool]:
        return [a.answered for a in self._answers.values() if a.answered is not None]

    def _is_hidden(self) -> bool:
        """Say whether two could not dial this peer, or one whom no two others contradict."""
        said = self._said()
        failed, dialled = said.count(False), said.count(True)
        return failed >= _BELIEVED or (failed > 0 and dialled < _BELIEVED)

    def due(self) -> list[str]:
        """Return the peers to ask now."""
        if self._local:
            return []
        now_s = asyncio.get_running_loop().time()
        there = {record.peer_id for record in self._context.roster.others}
        self._answers = {peer: one for peer, one in self._answers.items() if peer in there}
        again = [peer for peer, one in self._answers.items() if one.at_s + one.lasts_s <= now_s]
        new = sorted(there - self._answers.keys(), key=self._rank)
        return [*new[: max(0, _ASKED - len(self._answers))], *again][:_AT_ONCE]

    def _rank(self, peer_id: str) -> bytes:
        """Return what sorts the others differently at each peer: no one is asked by all."""
        pair = f"{self._context.peer_id} {peer_id}"
        return hashlib.blake2b(pair.encode(), digest_size=8).digest()

    async def ask(self, peer_ids: list[str]) -> None:
        """Have these peers dial this one."""
        now_s = asyncio.get_running_loop().time()
        for peer_id in peer_ids:  # nobody asks them again meanwhile
            before = self._answers.get(peer_id, _Answer(None, now_s))
            self._answers[peer_id] = _Answer(before.answered, now_s)
        for peer_id, answered in zip(
            peer_ids, await asyncio.gather(*map(self._ask, peer_ids)), strict=True
        ):
            self._answers[peer_id] = _Answer(answered, asyncio.get_running_loop().time())
        if self._said():
            self.needs_relays = self._is_hidden()

    async def _ask(self, peer_id: str) -> bool | None:
        context = self._context
        try:
            channel = await context.open(peer_id)
            try:
                await channel.send(AskDial(address=context.transport.address))
                # It dials for as long as its own measurements say, which is no longer than that.
                within_s = context.waits.answer_s(peer_id) + context.config.endpoint.connect_s
                said = await channel.receive(Dialled, within_s)
            finally:
                channel.close()
        except (LinkLost, BadMessage) as error:
            _log.debug("peer %s does not say whether it can dial: %s", peer_id[-8:], error)
            return None
        _log.debug("peer %s dialled this one: %s", peer_id[-8:], said.answered)
        return said.answered
