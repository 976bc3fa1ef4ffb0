"""Stale fragments: found by comparing stamps, fetched from whoever holds the best anchor.

Also keeps which fragments are in use by a round or a fetch, so that the two never meet, and the
rounds in doubt: whose decision this peer did not hear.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import replace

from atomtrain.errors import SwarmError
from atomtrain.swarm.anchors.stamps import Stamp, supersedes
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.catchup.fetching import Fetched, Fetcher
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.round_member import Doubt, merge_of_fetched

_log = logging.getLogger("atomtrain.swarm")
_AT_ONCE = 3
_WAY_SHARE = 0.25
"""Of the least time that any part of a round has: how long a round waits for such a fetch."""


class Repairer:
    """Fetches what others have newer, three fragments at a time."""

    def __init__(self, context: Context) -> None:
        """Prepare; nothing is fetched before `repair`."""
        self._context = context
        self.fetcher = Fetcher(context)
        self.running = 0
        """Fetches under way."""
        self.busy: set[int] = set()
        """Fragments that a round or a fetch uses now."""
        self.awaited: set[int] = set()
        """Fragments for which a round waits: no new fetch gets in before it."""
        self.freed = asyncio.Event()
        """Set whenever a fragment is not used any more."""
        self.doubts: dict[int, Doubt] = {}
        """By fragment: rounds whose decision was not heard."""
        self._tried: dict[int, asyncio.Future[Fetched]] = {}
        """By fragment: fetches of what nothing certifies."""
        self.astray: set[int] = set()
        """Fragments of which this peer's anchor is not a sibling of the others', whatever its
        version."""

    def free(self, fragment: int) -> None:
        """A round or a fetch is over."""
        self.busy.discard(fragment)
        self.freed.set()

    def stale(self) -> int | None:
        """Return a fragment that another peer has newer and nobody uses here, if there is one.

        Of several the one whose next round is farthest away: it stays current longest.
        """
        count = len(self._context.manifest.fragment_elements)
        best = self._context.roster.best()
        for age in range(1, count + 1):
            fragment = (self._context.agenda.next_round - age) % count
            own, other = self._context.mailbox.stamp(fragment), best[fragment]
            if other is None or own is None or fragment in self.busy | self.awaited:
                continue
            if supersedes(other, own, self._slack(fragment)) or self._decided(fragment, own):
                return fragment
        return None

    def _slack(self, fragment: int) -> int:
        return 0 if fragment in self.astray else self._context.slack(fragment)

    def _decided(self, fragment: int, own: Stamp) -> bool:
        """Say whether another member of a round in doubt has, by its record, a result of it."""
        doubt = self.doubts.get(fragment)
        if doubt is None:
            return False
        keeps = self._context.claims.keeps
        stamps = (r.stamps[fragment] for r in self._context.roster.others
                  if r.peer_id in doubt.members and keeps(r.peer_id))  # fmt: skip
        return any(stamp is not None and stamp.beats(own) for stamp in stamps)

    @property
    def wanted(self) -> bool:
        """There is something to fetch, and too little under way."""
        return self.running < _AT_ONCE and self.stale() is not None

    async def repair(self) -> None:
        """Fetch until nothing is stale, or nobody gives it; several may run at once."""
        self.running += 1
        try:
            while (fragment := self.stale()) is not None:
                self.busy.add(fragment)
                try:
                    await self.repair_one(fragment)
                finally:
                    self.free(fragment)
        except SwarmError as error:
            _log.info("a stale fragment stays for now: %s", error)
        finally:
            self.running -= 1
            self.note_coming()

    def note_coming(self) -> None:
        """Tell the trainer whether more than what it has is to come."""
        self._context.mailbox.coming = self.running > 0 or self.stale() is not None

    async def repair_one(self, fragment: int) -> None:
        """Fetch a fragment, marked busy by the caller, from whoever has it; raises `SwarmError`."""
        started_s = asyncio.get_running_loop().time()
        doubt = self.doubts.get(fragment)
        first = doubt.members if doubt is not None else ()
        fetched = await self._fetched(fragment, first)
        if not self._leave_fetched(fragment, fetched, started_s):
            raise SwarmError(f"no peer gave a newer anchor of fragment {fragment}; trying later")

    async def _fetched(self, fragment: int, first: Collection[str]) -> Fetched:
        """Fetch what is better; what nothing certifies makes way for a round, see `make_way`."""
        own = self._context.mailbox.stamp(fragment)
        assert own is not None, "what is not there is not repaired"
        certain = self._context.roster.best(certain=True)[fragment]
        fetching = asyncio.ensure_future(self.fetcher.fetch_better(fragment, own, first))
        if not first and (certain is None or not certain.beats(own)):
            self._tried[fragment] = fetching
        try:
            await asyncio.wait([fetching])
        finally:
            self._tried.pop(fragment, None)
            fetching.cancel()
        if fetching.cancelled():
            raise SwarmError(f"a round came before a better anchor of fragment {fragment}")
        return fetching.result()

    def make_way(self, fragment: int) -> None:
        """Soon give up, for now, what is fetched without a certificate: a round of it waits.

        Not at once: where rounds follow each other closely nothing would ever come to its end. Who
        has sent nothing by then has not given what it claims.
        """
        if (fetching := self._tried.get(fragment)) is not None:
            loop, floor_s = asyncio.get_running_loop(), self._context.timing.floor_s
            loop.call_later(_WAY_SHARE * floor_s, fetching.cancel)

    async def repair_from(self, donor: str, fragment: int) -> None:
        """Fetch a better anchor, of a fragment marked busy by the caller, from one donor.

        Raises:
            LinkLost: the donor is gone.
            BadMessage: it sent something else, or what does not count.
        """
        started_s = asyncio.get_running_loop().time()
        own = self._context.mailbox.stamp(fragment)
        assert own is not None, "what is not there is not repaired"
        doubt = self.doubts.get(fragment)
        believed = doubt is not None and donor in doubt.members
        fetched = await self.fetcher.fetch_kept(donor, fragment, own, believed=believed)
        self._leave_fetched(fragment, fetched, started_s)

    def _leave_fetched(self, fragment: int, fetched: Fetched, started_s: float) -> bool:
        """Have a fetched anchor merged; says False, and does nothing, if it is no better."""
        context, anchor = self._context, fetched.anchor
        own = context.mailbox.stamp(fragment)
        if own is None or not anchor.stamp.beats(own):
            return False
        doubt = self.doubts.pop(fragment, None)
        self.astray.discard(fragment)
        present = context.mailbox.store.anchor(fragment)
        if present.stamp != own:  # another merge waits: the doubt's anchor will not be present
            doubt = None
        merge = merge_of_fetched(fragment, anchor, present, doubt, context.peer_id)
        merge = replace(merge, donor=fetched.donor)
        report = RoundReport(
            round=context.agenda.next_round,
            fragment=fragment,
            version=anchor.stamp.version,
            outcome="fetched",
            bytes_received=fetched.received_bytes,
            duration_s=asyncio.get_running_loop().time() - started_s,
        )
        context.mailbox.leave_merge(merge, report)
        self.note_coming()
        return True
