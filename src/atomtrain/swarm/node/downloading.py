"""How a newcomer, or a peer that resumes, gets what the swarm holds now, from several at once.

A newcomer has nothing to compare stamps with, and no anchor of its own. It has a model as it was
made, random or trained before, and text: what it gets must not be worse than that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from atomtrain.errors import SwarmError
from atomtrain.progress import Progress
from atomtrain.swarm.anchors.anchor_store import FragmentAccess
from atomtrain.swarm.anchors.anchors import Merge, whole
from atomtrain.swarm.anchors.stamps import supersedes
from atomtrain.swarm.anchors.trial import Trial
from atomtrain.swarm.catchup.fetching import Fetched
from atomtrain.swarm.node.network_thread import LoopThread
from atomtrain.swarm.node.service import Service

_log = logging.getLogger("atomtrain.swarm")
_AHEAD = 4
"""Fragments that a newcomer fetches at once, each from the donor with the least to do."""


class NoGoodModel(SwarmError):  # noqa: N818 - what it is reads better than what it raises
    """No peer of the run has a model that is better than the one that a newcomer began with."""


class Had(NamedTuple):
    """A fragment that has come."""

    fragment: int
    fetched: Fetched


class Downloading:
    """Fetches on the network thread, and writes on the caller's, the training thread."""

    def __init__(self, thread: LoopThread, service: Service) -> None:
        """Fetch for one peer."""
        self._thread, self._service = thread, service
        self._mailbox = service.context.mailbox
        self._progress = Progress("fetching")
        self._all = range(len(service.context.manifest.fragment_elements))

    def download(self, access: FragmentAccess) -> None:
        """Fetch all anchors, write them to the model, and put them in place.

        Raises:
            SwarmError: a fragment could not be had from anybody.
            NoGoodModel: all that was had is worse than the model before.
        """
        self._see_manifests()
        elements = sum(self._service.context.manifest.fragment_elements)
        with Progress("fetching the model from the swarm", elements, "parameters") as progress:
            self._progress = progress
            self._download(access)

    def _download(self, access: FragmentAccess) -> None:
        trial = self._mailbox.trial
        if trial is None:
            for had in self._fetched(self._all):
                self._write(had, access)
                self._place([had])
            return
        before = trial.loss()
        found, why = self._tried(trial, self._fetched(self._all), access, before)
        donors = {had.fetched.donor for had in found}
        if why and len(donors) == 1:
            self._turn_down(donors.pop(), found)
        if why:
            found = self._of_one(trial, access, before, why)
        self._place(found)

    def _see_manifests(self) -> None:
        """Say so if as many peers are in another run of this name as in this one."""
        context = self._service.context
        here, elsewhere = len(context.roster.members) - 1, len(context.roster.of_another)
        if elsewhere and elsewhere >= here:
            _log.warning(
                "%d peers are in another run of the name %r, and %d in the one that this peer was "
                "led to; it could not tell which is meant", elsewhere, context.config.run, here,
            )  # fmt: skip

    def _of_one(self, trial: Trial, access: FragmentAccess, before: float, why: str) -> list[Had]:
        """Return all fragments from the first donor whose whole model is good."""
        for donor in self._thread.submit(self._donors()).result():
            try:
                found, why = self._tried(trial, self._fetched(self._all, donor), access, before)
            except SwarmError as error:
                why = str(error)
                continue
            if not why:
                return found
            self._turn_down(donor, found)
        raise NoGoodModel(
            f"no peer of run {self._service.context.config.run!r} gave a model that is better than "
            f"an untrained one: {why}; join through a peer that you trust, and see that --data is "
            "text like that of the run"
        )

    def _tried(
        self, trial: Trial, fetched: Iterable[Had], access: FragmentAccess, before: float
    ) -> tuple[list[Had], str]:
        """Write fragments to the model; return them, and why it is worse than before, if it is."""
        found = []
        for had in fetched:
            self._write(had, access)
            found.append(had)
        return found, trial.objection(before)

    def _turn_down(self, donor: str, found: Iterable[Had]) -> None:
        digests = [had.fetched.anchor.stamp.digest for had in found]
        self._thread.submit(self._forget(donor, digests)).result()

    def _write(self, had: Had, access: FragmentAccess) -> None:
        with access.view(had.fragment) as local:
            self._mailbox.store.check_size(had.fragment, local)
            local.copy_(had.fetched.anchor.values)
        self._progress.advance(local.numel())

    def _place(self, found: Iterable[Had]) -> None:
        for fragment, fetched in found:
            self._mailbox.store.place(fragment, fetched.anchor)

    def catch_up(self, access: FragmentAccess) -> None:
        """Fetch what others have newer, and move the parameters by the difference.

        Raises:
            SwarmError: a fragment could not be had from anybody.
        """
        store, context = self._mailbox.store, self._service.context
        stale = [
            f
            for f, stamp in enumerate(context.roster.best())
            if stamp is not None and supersedes(stamp, store.anchor(f).stamp, context.slack(f))
        ]
        merges = []
        for fragment, (anchor, _, donor) in self._fetched(stale):
            if not anchor.stamp.beats(store.anchor(fragment).stamp):
                continue
            merge = Merge(fragment, anchor, whole(anchor.values.numel()), donor=donor)
            if self._mailbox.trial is None:
                self._mailbox.merge_now(merge, access)
                store.forget_residual(fragment)
            else:
                merges.append(merge)
        if self._mailbox.trial is None or not merges:
            return
        found = self._mailbox.trial.take_fetched(merges, access, coming=False)
        for merge, why in zip(merges, found, strict=True):
            if not why:
                # It may have been sent after the checkpoint was written, and be in this anchor.
                store.forget_residual(merge.fragment)

    def _fetched(self, fragments: Iterable[int], donor: str = "") -> Iterator[Had]:
        """Yield anchors as the swarm has them, or `donor`, several under way at once.

        Those whose next round is farthest away come first: they stay current longest.
        """
        context = self._service.context
        next_round = context.agenda.next_round
        order = deque(sorted(fragments, key=lambda f: (next_round - 1 - f) % len(self._all)))
        patience_s = 2 * context.config.expiry_s + context.config.endpoint.connect_s
        fetches: deque[tuple[int, Future[Fetched]]] = deque()
        try:
            while order or fetches:
                while order and len(fetches) < _AHEAD:
                    fragment = order.popleft()
                    fetching = self._fetch(fragment, patience_s, donor)
                    fetches.append((fragment, self._thread.submit(fetching)))
                fragment, future = fetches[0]
                fetched = future.result()
                fetches.popleft()
                yield Had(fragment, fetched)
        finally:
            for _, future in fetches:
                future.cancel()

    # On the network thread ------------------------------------------------------------------

    async def _fetch(self, fragment: int, patience_s: float, donor: str) -> Fetched:
        """Return the swarm's anchor of a fragment, or that of `donor`; raises `SwarmError`."""
        fetcher = self._service.fetcher
        if not donor:
            return await fetcher.fetch(fragment, patience_s)
        try:
            async with asyncio.timeout(patience_s):
                return await fetcher.fetch_from(donor, fragment)
        except TimeoutError as error:
            raise SwarmError(
                f"fragment {fragment} did not come from peer {donor[-8:]} within {patience_s:.0f} s"
            ) from error

    async def _donors(self) -> list[str]:
        """Return the peers that have the whole model, the best first, by records read anew."""
        context = self._service.context
        context.roster.update(await context.directory.records())
        complete = {r.peer_id for r in context.roster.others if None not in r.stamps}
        holders = context.roster.holders(0, context.slack(0))
        return [holder.peer_id for holder in holders if holder.peer_id in complete]

    async def _forget(self, donor: str, digests: Iterable[str]) -> None:
        """Have a donor count as gone for a while, and what only it has for good.

        An anchor that others have as well is not what did it, or they are asked for it, too.
        """
        roster = self._service.context.roster
        _log.warning("the model that peer %s gave is worse than an untrained one", donor[-8:])
        roster.bar(donor)
        for digest in digests:
            if not roster.claimants(digest):
                roster.refuse(digest)
