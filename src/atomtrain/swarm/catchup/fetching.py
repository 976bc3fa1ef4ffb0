"""Anchors are fetched from several peers at once.

A fetch that is cut off keeps what has come. The next donor is asked for the rest if it holds the
same anchor, which its hash shows; else for its own from the start. What is complete is checked
against the hash, whoever gave the parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.anchors import Anchor, Origin, Part, digest_of
from atomtrain.swarm.anchors.buffer_pool import pooled_empty
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.updates import Update
from atomtrain.swarm.catchup.certifying import Certifier
from atomtrain.swarm.catchup.donating import Partial
from atomtrain.swarm.catchup.vouching import NotVouched, Silence, check_vouched
from atomtrain.swarm.codecs.codec import all_finite
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.membership.roster import Holder
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.messages import AnchorHeader, AskAnchor
from atomtrain.swarm.transport.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_RETRY_S = 0.5
_LOOKS = 2
"""Times that the records are read before nobody is believed to be there."""
_HALVINGS = 3
"""Who could not tell asks for half as long for the next anchor, so often at most: else peers that
answer nothing would hold a newcomer for the same time at each fragment."""
_DOUBTFUL = 4
"""Donors that are tried then at a time, with what others say who answer."""


class NotCertified(BadMessage):
    """A donor gives a better anchor, and nothing shows that members of a round have made it."""


class Fetched(NamedTuple):
    """An anchor that has come, and what it took."""

    anchor: Anchor
    received_bytes: int
    donor: str
    """Who gave the last of it."""


class Fetcher:
    """Gets anchors from whoever has them, falling over to the next donor when one fails."""

    def __init__(self, context: Context) -> None:
        """Fetch for one peer."""
        self._context = context
        self.certifier = Certifier(context)
        self._partial: dict[int, Partial] = {}
        self._asked: Counter[str] = Counter()
        """Fetches under way from each donor."""
        self._fruitless: Counter[str] = Counter()
        """Fetches of a newcomer's that each donor ended with nothing good."""
        self._arrivals: Counter[int] = Counter()
        """By fragment: times that something of an anchor came."""
        self._in_doubt = 0
        """Anchors in a row that this peer, a newcomer, has taken without knowing whose is right."""
        self._told_of_sole = False

    async def fetch_better(
        self, fragment: int, own: Stamp, doubted: Collection[str] = ()
    ) -> Fetched:
        """Return a better anchor than this peer's own, from whoever claims one that counts.

        Each is asked once; first those `doubted`: the members of a round whose decision was not
        heard, whom this peer knows to have made something. What is not given is not believed for a
        while.

        Raises:
            SwarmError: none of them gave one.
        """
        why = "nobody claims one that counts"
        for donor in self._better(fragment, own, doubted):
            try:
                return await self.fetch_kept(donor, fragment, own, believed=donor in doubted)
            except NotCertified as error:
                why = str(error)
            except (LinkLost, BadMessage) as error:
                why = str(error)
                _log.info("fetching fragment %d: %s", fragment, error)
                self._context.roster.suspect(donor)
        raise SwarmError(f"no peer gave a better anchor of fragment {fragment}: {why}")

    async def fetch_kept(
        self, donor: str, fragment: int, own: Stamp, *, believed: bool = False
    ) -> Fetched:
        """Return a better anchor than `own` from a donor, and remember whether it gave one.

        A link that breaks, or a round that does not wait, says nothing against a donor some of
        whose anchor has come.

        Raises:
            NotCertified: what it has does not count, and it is not `believed`.
            LinkLost: the donor is gone, or refused; what has come is kept for the next one.
            BadMessage: it has nothing better, or what came is not what was announced.
        """
        arrivals = self._arrivals[fragment]
        try:
            fetched = await self.fetch_from(donor, fragment, own, believed=believed)
        except NotCertified:
            raise
        except BadMessage:
            self._context.claims.broke(donor)
            raise
        except (LinkLost, asyncio.CancelledError):
            if self._arrivals[fragment] == arrivals:
                self._context.claims.broke(donor)
            raise
        self._context.claims.gave(donor)
        return fetched

    def _better(self, fragment: int, own: Stamp, doubted: Collection[str]) -> list[str]:
        """Return who claims a better anchor, and is believed."""
        claims, roster = self._context.claims, self._context.roster
        known = [r.peer_id for r in roster.others if r.peer_id in doubted
                 and (stamp := r.stamps[fragment]) is not None and stamp.beats(own)
                 and claims.keeps(r.peer_id)]  # fmt: skip
        claimed = {r.peer_id: r.stamps[fragment] for r in roster.others}
        others = [donor for donor in self._donors(fragment, ()) if donor not in known
                  and (stamp := claimed[donor]) is not None and stamp.beats(own)]  # fmt: skip
        # What is certified comes first.
        others.sort(key=lambda donor: not roster.certain(donor, fragment, claimed[donor], own))
        return known + others

    async def fetch(self, fragment: int, patience_s: float, first: Collection[str] = ()) -> Fetched:
        """Return the best anchor of a fragment that any peer gives; those named are asked `first`.

        Donors that fail are not asked again until their next record; while there is none to ask,
        the membership records are read again. Who has no anchor of its own takes one that most of
        those who are asked have had, too. If there is none for half of `patience_s`, or less where
        it could not tell of the last ones either, it takes what most of those have had who answer,
        or any, and the log says so.

        Raises:
            SwarmError: for `patience_s` no donor gave any of it, or all peers have left.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        silence = Silence.AGAINST if self._context.mailbox.stamp(fragment) is None else None
        sure_until_s = loop.time() + patience_s / (2 << min(self._in_doubt, _HALVINGS))
        why, nobody = "no peer has it", 0
        unvouched: dict[str, NotVouched] = {}
        while True:
            for donor in self._donors(fragment, first):
                if unvouched and loop.time() >= sure_until_s:
                    break
                if not self._context.roster.answers(donor):  # it has failed another fetch since
                    continue
                try:
                    fetched = await self.fetch_from(donor, fragment, silence=silence)
                    self._in_doubt = 0
                    return fetched
                except NotVouched as error:
                    why, unvouched[donor] = str(error), error
                    _log.info("fetching fragment %d: %s", fragment, error)
                except (LinkLost, BadMessage) as error:
                    why = str(error)
                    self._failed(donor, fragment, error)
                    if fragment in self._partial:
                        until_s = loop.time() + patience_s
            if unvouched and loop.time() >= sure_until_s:
                doubtful = await self._fetch_doubtful(fragment, first, unvouched, until_s)
                if doubtful is not None:
                    return doubtful
            run = self._context.config.run
            nobody = nobody + 1 if self._context.roster.all_left else 0
            if nobody > _LOOKS:
                raise SwarmError(
                    f"all peers of run {run!r} have finished and left: nobody is there to learn "
                    "from; continue the run of one of them with --resume, or start a new one"
                )
            if loop.time() >= until_s:
                raise SwarmError(
                    f"fragment {fragment} of run {run!r} could not be fetched "
                    f"from any peer within {patience_s:.0f} s: {why}; join again when a peer that "
                    "trains is reachable"
                )
            await asyncio.sleep(_RETRY_S)
            self._context.roster.update(await self._context.directory.records())

    async def _fetch_doubtful(
        self,
        fragment: int,
        first: Collection[str],
        unvouched: dict[str, NotVouched],
        until_s: float,
    ) -> Fetched | None:
        """Return what most of those have had who answer, or, once no donor is left that has not
        been tried so, or it is `until_s`, what the likeliest one gives.

        What a donor gave before it may not give again, so others are asked once more.
        """
        loop = asyncio.get_running_loop()

        def likeliest() -> list[str]:
            donors = self._donors(fragment, first)
            leads = {donor: error.lead for donor, error in unvouched.items()}
            return sorted(donors, key=lambda donor: -leads.get(donor, 0))

        def untried() -> list[str]:
            return [donor for donor in likeliest()
                    if donor not in unvouched or not unvouched[donor].by_answers]  # fmt: skip

        def tries() -> Iterator[tuple[str, Silence | None]]:
            for donor in untried()[:_DOUBTFUL]:
                yield donor, Silence.NOTHING
            if not untried() or loop.time() >= until_s:
                yield from ((donor, None) for donor in likeliest()[:1])

        for donor, silence in tries():
            try:
                fetched = await self.fetch_from(donor, fragment, silence=silence)
            except NotVouched as error:
                unvouched[donor] = error
                _log.info("fetching fragment %d: %s", fragment, error)
            except (LinkLost, BadMessage) as error:
                self._failed(donor, fragment, error)
            else:
                self._in_doubt += 1
                doubt = unvouched.get(donor) or next(iter(unvouched.values()))
                _log.warning(
                    "fragment %d: %s; this peer could not tell whose is right, and has taken that "
                    "of peer %s", fragment, doubt, donor[-8:],
                )  # fmt: skip
                return fetched
        return None

    def _failed(self, donor: str, fragment: int, error: SwarmError) -> None:
        _log.info("fetching fragment %d: %s; trying another peer", fragment, error)
        self._fruitless[donor] += 1
        self._context.roster.suspect(donor)

    async def fetch_from(
        self,
        donor: str,
        fragment: int,
        own: Stamp | None = None,
        *,
        silence: Silence | None = None,
        believed: bool = False,
    ) -> Fetched:
        """Return a donor's anchor, or what it has of the one that was begun, checked.

        With `silence`, which says what it means if one does not answer, others are asked whether
        they have had it, too. With `own` it must be better than that, and count, unless the donor
        is `believed`.

        Raises:
            NotVouched: they have not.
            NotCertified: it does not count.
            LinkLost: the donor is gone, or refused; what has come is kept for the next one.
            BadMessage: what came is not what was announced.
        """
        self._asked[donor] += 1
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        channel = await self._opened(donor)
        try:
            partial = await self._begin(channel, fragment, own, silence=silence, believed=believed)
            begun = channel.arrivals
            try:
                for piece in partial.missing():
                    await channel.receive_into(piece)
                    partial.filled_bytes += len(piece)
            finally:
                self._arrivals[fragment] += channel.arrivals - begun
            return Fetched(await self._checked(donor, fragment), channel.received_bytes, donor)
        finally:
            channel.close()
            self._context.timing.observe_fetch(channel.received_bytes, loop.time() - started_s)
            self._asked[donor] -= 1

    async def _opened(self, donor: str) -> Channel:
        try:
            return await self._context.open(donor, bulk=True)
        except BaseException:
            self._asked[donor] -= 1
            raise

    async def _begin(
        self,
        channel: Channel,
        fragment: int,
        own: Stamp | None,
        *,
        silence: Silence | None,
        believed: bool,
    ) -> Partial:
        """Ask for an anchor, or the rest of one; return what there is of it, possibly nothing."""
        context, had = self._context, self._partial.get(fragment)
        ask = AskAnchor(fragment=fragment, digest="", start_bytes=0)
        if had is not None:
            ask = AskAnchor(
                fragment=fragment, digest=had.header.digest, start_bytes=had.filled_bytes
            )
        await channel.send(ask)
        header = await channel.receive(AnchorHeader, channel.stall_s)
        if header.fragment != fragment:
            raise BadMessage(f"peer {channel.remote[-8:]} sent fragment {header.fragment}")
        elements = context.manifest.fragment_elements[fragment]
        origin_of(header, elements)
        if refusal := context.age.limit.refusal(_stamp(header)):
            raise BadMessage(f"peer {channel.remote[-8:]} sent an anchor of {refusal}")
        if header.digest in context.roster.refused:
            raise BadMessage(f"the anchor of peer {channel.remote[-8:]} has done harm here")
        if header.grouped and not context.manifest.rules.group_size:
            raise BadMessage(f"peer {channel.remote[-8:]} sent a group's anchor: there are none")
        context.certified.hear(fragment, header.digest, header.certificate)
        if own is not None:
            await self._check_better(channel.remote, header, own, believed=believed)
        if silence is not None:
            # The donor waits meanwhile, and not for ever.
            within_s = channel.stall_s / 2
            stamp = _stamp(header)
            if not await check_vouched(context, channel.remote, fragment, stamp, within_s, silence):
                self._tell_of_sole(channel.remote)
        resumed = (header.digest, header.start_bytes) == (ask.digest, ask.start_bytes)
        if had is not None and header.start_bytes and resumed:
            return had
        if header.start_bytes:
            raise BadMessage(f"peer {channel.remote[-8:]} sent the rest of something else")
        values = pooled_empty(elements)
        rows = 0 if header.grouped else context.mailbox.store.momentum
        velocity = pooled_empty(rows * elements) if rows else None
        self._partial[fragment] = partial = Partial(header, values, velocity)
        return partial

    def _tell_of_sole(self, donor: str) -> None:
        """Tell the log, once, that a run of strangers is what one of them says."""
        if self._context.admission.is_open and not self._told_of_sole:
            self._told_of_sole = True
            _log.warning(
                "peer %s is the only one that this peer sees, so it cannot tell whether that one "
                "gives what others have: join through several addresses", donor[-8:],
            )  # fmt: skip

    async def _check_better(
        self, donor: str, header: AnchorHeader, own: Stamp, *, believed: bool
    ) -> None:
        """Raise `BadMessage` if an anchor is no better than this peer's, or does not count."""
        roster, stamp = self._context.roster, _stamp(header)
        if not stamp.beats(own):
            raise BadMessage(f"peer {donor[-8:]} has no better anchor")
        if believed or roster.counts(donor, header.fragment, stamp, own):
            return
        if (c := self._context.certified.of(header.fragment, header.digest)) is not None:
            await self.certifier.fill(c)
        if not roster.counts(donor, header.fragment, stamp, own):
            raise NotCertified(f"nothing certifies the anchor of peer {donor[-8:]} yet")

    async def _checked(self, donor: str, fragment: int) -> Anchor:
        partial = self._partial.pop(fragment)
        header, values, velocity = partial.header, partial.values, partial.velocity
        if await self._context.offload(digest_of, values, velocity) != header.digest:
            raise BadMessage(f"fragment {fragment}, the last of it from peer {donor[-8:]}, has the "
                             "wrong hash")  # fmt: skip
        if wrong := await self._context.offload(_flaw, values, velocity, self._context.updates[0]):
            self._context.roster.distrust(donor, f"its anchor of fragment {fragment} has {wrong}")
            raise BadMessage(f"the anchor of peer {donor[-8:]} has {wrong}")
        origin = origin_of(header, values.numel())
        return Anchor(values, velocity, _stamp(header), origin, header.grouped)

    def _donors(self, fragment: int, first: Collection[str]) -> list[str]:
        """Return those that have the fragment: the best anchor, and the least to do, first."""

        # Who has nothing of its own to go by prefers what several agree on, then who has not
        # failed: who gives nothing, but renews its record, is not asked first at each fragment.
        newcomer = self._context.mailbox.stamp(fragment) is None

        def order(holder: Holder) -> tuple[bool, bool, int, bool, bool, int]:
            wanted, asked = holder.peer_id in first, self._asked[holder.peer_id]
            fruitless = self._fruitless[holder.peer_id] if newcomer else 0
            lonely = newcomer and holder.lonely
            return not wanted, lonely, fruitless, holder.stale, holder.joining, asked

        holders = self._context.roster.holders(fragment, self._context.slack(fragment))
        return [holder.peer_id for holder in sorted(holders, key=order)]


def _stamp(header: AnchorHeader) -> Stamp:
    return Stamp(header.version, header.tokens, header.digest)


def _flaw(values: torch.Tensor, velocity: torch.Tensor | None, update: Update) -> str:
    """Return why rounds cannot go on from an anchor, or an empty string."""
    if not all_finite(values) or (velocity is not None and not all_finite(velocity)):
        return "values that are not finite"
    if velocity is not None and not update.admits(velocity):
        return "a velocity that no update makes"
    return ""


def origin_of(header: AnchorHeader, elements: int) -> Origin:
    """Return which round made an anchor; raises `BadMessage`."""
    parts = []
    try:
        for start, stop, text in zip(header.starts, header.stops, header.contributors, strict=True):
            if not 0 <= start <= stop <= elements:
                raise ValueError("span outside the fragment")
            if not all(number.isdecimal() for number in text.split()):
                raise ValueError("not the numbers of members")
            names = frozenset(header.members[int(i)] for i in text.split())
            parts.append(Part(Span(start, stop), names))
    except (ValueError, IndexError) as error:
        raise BadMessage(f"an anchor's origin cannot be read: {error}") from error
    return Origin(header.round_id, tuple(parts))
