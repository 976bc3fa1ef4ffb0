"""What a newcomer goes by that has no anchor of its own: that others have had the same one.

A donor's word proves nothing. So a newcomer asks others, over streams that prove who they are,
whether they have had what the donor gives. It takes what more than half of all have, the donor
included. Where a swarm has several groups, which have anchors of their own, one other is enough.

Who does not answer in time has not said so, whatever else failed with it before: else a busy
machine, or whoever keeps honest peers from answering, would leave a newcomer with the liars alone.
Only a process that has ended does not count, which shows where it listened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from enum import Enum

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.membership.records import PeerRecord
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.addresses import circuits_to
from atomtrain.swarm.transport.messages import AskKnown, Known
from atomtrain.swarm.transport.transport import Channel, LinkLost, PeerRefused

_ASKED, _MET = 16, 7
"""How many others are asked, and how many of them, at most, because they were met. Anybody can
write records of peers that are not there; and anybody can come, so those met are the fewer."""


class Silence(Enum):
    """What it means that somebody who was asked has not answered."""

    AGAINST = "against"
    """It has not said so."""
    NOTHING = "nothing"
    """Only answers count: where there is no time to ask again."""


class NotVouched(BadMessage):
    """A donor gives an anchor that too few others say they have had."""

    def __init__(self, why: str, having: int, without: int, silence: Silence) -> None:
        """So many say that they have had it, the donor included, and so many that they have not."""
        super().__init__(why)
        self.lead = having - without
        self.by_answers = silence is Silence.NOTHING
        """Whether the answers alone say so."""


class _Answer(Enum):
    HAD = "had"
    NOT_HAD = "not had"
    SILENT = "silent"
    ENDED = "ended"
    """Its process is not there any more."""


async def check_vouched(
    context: Context, donor: str, fragment: int, stamp: Stamp, within_s: float, silence: Silence
) -> bool:
    """Ask others, 16 at most, whether they have had a donor's anchor.

    Returns as soon as enough have said so, and whether there was anybody to ask. A donor that is
    the only one to have the fragment is believed.

    Raises:
        NotVouched: half of them, or more, have not, or have not said so within `within_s`, if that
            counts.
    """
    others = [r for r in context.roster.having(fragment) if r.peer_id != donor]
    asked = _chosen(context, others)
    waiting = {asyncio.create_task(_answer(context, one, fragment, stamp)) for one in asked}
    until_s = asyncio.get_running_loop().time() + within_s
    answers: list[_Answer] = []
    try:
        while True:
            having = 1 + answers.count(_Answer.HAD)
            count = 1 + len(asked) - answers.count(_Answer.ENDED)
            if _enough(context, having, count):
                return bool(asked)
            left_s = until_s - asyncio.get_running_loop().time()
            hopeless = not _enough(context, having + len(waiting), count)
            if left_s <= 0 or not waiting or (hopeless and silence is Silence.AGAINST):
                break
            done, waiting = await asyncio.wait(
                waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            answers += [task.result() for task in done]
    finally:
        for task in waiting:
            task.cancel()
    without = answers.count(_Answer.NOT_HAD)
    if silence is Silence.NOTHING and _enough(context, having, having + without):
        return True
    silent = len(waiting) + answers.count(_Answer.SILENT)
    raise NotVouched(
        f"of {count} peers that have an anchor, {having} say that they have had the one that peer "
        f"{donor[-8:]} gives, and {silent} have not answered",
        having,
        without,
        silence,
    )


def _chosen(context: Context, others: Sequence[PeerRecord]) -> list[PeerRecord]:
    """Draw whom to ask: some that were met, and others."""
    drawn = random.sample(others, len(others))
    met = [one for one in drawn if context.roster.met(one.peer_id)][:_MET]
    return [*met, *(one for one in drawn if one not in met)][:_ASKED]


def _enough(context: Context, having: int, count: int) -> bool:
    """Say whether an anchor is believed that so many of all have had, the donor included."""
    return count == 1 or (having > 1 if context.roster.groups > 1 else 2 * having > count)


async def send_known(channel: Channel, context: Context, ask: AskKnown) -> None:
    """Answer `AskKnown`: what has done harm here is not vouched for."""
    stamp = Stamp(ask.version, ask.tokens, ask.digest)
    had = context.mailbox.store.had(ask.fragment, stamp)
    await channel.send(Known(known=had and ask.digest not in context.roster.refused))


async def _answer(context: Context, peer: PeerRecord, fragment: int, stamp: Stamp) -> _Answer:
    """Return what a peer says, as soon as it does; the caller has a deadline."""
    ask = AskKnown(
        fragment=fragment, version=stamp.version, tokens=stamp.tokens, digest=stamp.digest
    )
    try:
        channel = await context.open(peer.peer_id)
        try:
            said = await context.ask(channel, ask, Known)
        finally:
            channel.close()
    except (PeerRefused, BadMessage):
        return _Answer.SILENT
    except LinkLost:
        # Behind a NAT nobody listens at the addresses that a peer knows of itself.
        straight = not circuits_to(peer.peer_id, peer.addresses)
        ended = straight and await context.transport.refused(peer.addresses)
        return _Answer.ENDED if ended else _Answer.SILENT
    return _Answer.HAD if said.known else _Answer.NOT_HAD
