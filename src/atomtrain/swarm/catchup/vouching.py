"""What a newcomer goes by that has no anchor of its own: that others have had the same one.

A donor's word proves nothing. So a newcomer asks others, over streams that prove who they are,
whether they have had what the donor gives. It takes what more than half of all have, the donor
included. Where a swarm has several groups, which have anchors of their own, one other is enough.
"""

from __future__ import annotations

import asyncio
import random

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import AskKnown, Known
from atomtrain.swarm.transport.transport import Channel, LinkLost

_ASKED = 16


class NotVouched(BadMessage):
    """A donor gives an anchor that too few others say they have had."""


async def check_vouched(context: Context, donor: str, fragment: int, stamp: Stamp) -> None:
    """Ask others, 16 at most, whether they have had a donor's anchor.

    Whoever does not answer does not count. A donor that is the only one to have the fragment is
    believed: there is nobody to ask.

    Raises:
        NotVouched: half of them, or more, have not.
    """
    others = [r.peer_id for r in context.roster.others
              if r.peer_id != donor and r.stamps[fragment] is not None]  # fmt: skip
    asked = random.sample(others, min(_ASKED, len(others)))
    answers = await asyncio.gather(*(_known(context, peer, fragment, stamp) for peer in asked))
    said = [answer for answer in answers if answer is not None]
    having = 1 + sum(said)
    several = context.roster.groups > 1
    if said and not (having > 1 if several else 2 * having > 1 + len(said)):
        raise NotVouched(
            f"of {1 + len(said)} peers that were asked, only {having} say that they have had the "
            f"anchor that peer {donor[-8:]} gives"
        )


async def send_known(channel: Channel, context: Context, ask: AskKnown) -> None:
    """Answer `AskKnown`."""
    stamp = Stamp(ask.version, ask.tokens, ask.digest)
    await channel.send(Known(known=context.mailbox.store.had(ask.fragment, stamp)))


async def _known(context: Context, peer_id: str, fragment: int, stamp: Stamp) -> bool | None:
    try:
        channel = await context.open(peer_id)
    except LinkLost:
        return None
    ask = AskKnown(
        fragment=fragment, version=stamp.version, tokens=stamp.tokens, digest=stamp.digest
    )
    try:
        return (await context.ask(channel, ask, Known)).known
    except (LinkLost, BadMessage):
        return None
    finally:
        channel.close()
