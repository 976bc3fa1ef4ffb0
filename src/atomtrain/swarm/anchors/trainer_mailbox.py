"""The mailbox between the training thread and the network thread, and what lies in it.

The network side leaves requests (a snapshot, an anchor to merge); the training thread serves them
at its next boundary, between two steps, and leaves its progress. Nobody has to wait for the other
here; a trainer that has nothing else to do can.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore, FragmentAccess, GradientAccess
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot
from atomtrain.swarm.anchors.losses import Judge
from atomtrain.swarm.anchors.stamps import Stamp, steady_s
from atomtrain.swarm.anchors.trial import Refusal, Trial


@dataclass(frozen=True)
class RoundReport:
    """How a round ended for this peer."""

    round: int
    """Index of the round; for a fetch, the next round at that time."""
    fragment: int
    """The fragment it was about."""
    version: int
    """Version of the fragment's anchor at this peer afterwards."""
    outcome: str
    """`averaged`: all slices and members; `partial`: some; `abandoned`; `fetched` from a peer;
    `refused`: undone, since it made this peer's loss worse (`reason` says how)."""
    contributors: tuple[str, ...] = ()
    """Ids of the peers whose contribution is in at least one slice."""
    weights: tuple[int, ...] = ()
    """Tokens each contributor stands for."""
    bytes_sent: int = 0
    """Bytes given to the transport."""
    bytes_received: int = 0
    """Bytes taken from it."""
    duration_s: float = 0.0
    """From invitation to decision."""
    reason: str = ""
    """Why it was abandoned or partial; otherwise empty or a remark."""
    rejected: tuple[str, ...] = ()
    """`PEER: WHY` for each contribution that this peer rejected on evidence."""


@dataclass(frozen=True)
class LocalProgress:
    """What the trainer said at its last boundary."""

    steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0


Waiting = tuple[Merge, RoundReport]
"""What is to be merged, and what is to be reported then."""


class TrainerMailbox:
    """Thread-safe mailbox and owner of the anchor store."""

    def __init__(self, store: AnchorStore, on_boundary: Callable[[int, int], None]) -> None:
        """Call `on_boundary(steps, merges)` on the training thread after each boundary."""
        self.on_refusal: Callable[[Refusal], None] = lambda _: None
        """Called for each anchor that a trial refuses, on the training thread."""
        self.on_merged: Callable[[Anchor], None] = lambda _: None
        """Called for each anchor that was merged, and not undone, on that thread, too."""
        self.store = store
        self._on_boundary = on_boundary
        self._lock = threading.RLock()
        self._news = threading.Event()  # changed under the lock
        self._wanted: dict[int, tuple[torch.Tensor, Callable[[Snapshot], None]]] = {}
        self._merges: deque[Waiting] = deque()
        self._reports: deque[RoundReport] = deque(maxlen=1000)
        self._progress = LocalProgress()
        self._spare: torch.Tensor | None = None
        self._trial: Trial | None = None
        self._spoilt = False
        self.coming = False
        """Other fragments are being fetched, too, or are to be."""

    @property
    def trial(self) -> Trial | None:
        """What judges merges; None: nothing does."""
        return self._trial

    def use_judge(self, judge: Judge, clock: Callable[[], float] = steady_s) -> None:
        """Have merges judged by the loss that `judge` returns; `clock` says what that takes."""
        self._trial = Trial(judge, self.store, self._lock, self.on_refusal, clock)

    @property
    def progress(self) -> LocalProgress:
        """The trainer's last word."""
        return self._progress

    def want_snapshot(
        self, fragment: int, into: torch.Tensor, deliver: Callable[[Snapshot], None]
    ) -> None:
        """Have the fragment copied to `into`, and `deliver` called, at the next boundary.

        `into` should have been written before: fresh memory costs the training thread several times
        the copy itself.
        """
        with self._lock:
            self._wanted[fragment] = (into, deliver)
            self._news.set()

    def take_spare(self, elements: int) -> torch.Tensor | None:
        """Return memory of that size that an earlier snapshot has left, if there is some."""
        with self._lock:
            spare, self._spare = self._spare, None
            return spare if spare is not None and spare.numel() == elements else None

    def withdraw(self, fragment: int) -> None:
        """No snapshot is needed any more."""
        with self._lock:
            self._wanted.pop(fragment, None)

    @property
    def snapshot_wanted(self) -> bool:
        """Somebody waits for the next boundary."""
        return bool(self._wanted)

    def begin_again(self) -> None:
        """Have the parameters become the anchors again at the next boundary: they are not finite.

        Whoever goes on from them makes nothing that is, for ever.
        """
        with self._lock:
            self._spoilt = True
            self._news.set()

    def leave_merge(self, merge: Merge, report: RoundReport) -> None:
        """Have an anchor merged at the next boundary, and reported then."""
        with self._lock:
            self._merges.append((merge, report))
            self._news.set()

    def report(self, report: RoundReport) -> None:
        """Leave a report without a merge."""
        with self._lock:
            self._reports.append(report)
            self._news.set()

    def grouped(self, fragment: int) -> bool:
        """Say whether one of several groups made the anchor the fragment has, or will have."""
        with self._lock:
            for merge, _ in reversed(self._merges):
                if merge.fragment == fragment:
                    return merge.anchor.grouped
            return self.store.grouped(fragment)

    def stamp(self, fragment: int) -> Stamp | None:
        """Return the stamp the fragment has, or will have when what waits here is merged."""
        with self._lock:
            for merge, _ in reversed(self._merges):
                if merge.fragment == fragment:
                    return merge.anchor.stamp
            return self.store.stamps()[fragment]

    def boundary(
        self, *, steps: int, tokens: int, tokens_per_s: float, step_s: float, access: FragmentAccess
    ) -> list[RoundReport]:
        """Merge what has arrived, hand over the snapshots that are wanted, take progress."""
        with self._lock:
            self.store.tokens_seen += tokens
            self._progress = LocalProgress(
                self._progress.steps + steps,
                self._progress.tokens + tokens,
                tokens_per_s,
                step_s,
            )
            self._news.clear()
            spoilt, self._spoilt = self._spoilt, False
            if spoilt:
                self.store.begin_again(access)
        merges = 0
        while True:
            with self._lock:
                chosen = self._next()
                if not chosen:
                    self._hand_over(access)
                    reports = list(self._reports)
                    self._reports.clear()
                    break
            merges += self._take_in(chosen, access)  # without the lock: judging may take long
        self._on_boundary(steps, merges)
        return reports

    def _hand_over(self, access: FragmentAccess) -> None:
        for fragment, (into, deliver) in self._wanted.items():
            lent = access.view(fragment)
            if self.store.gradients:
                lent = cast(GradientAccess, access).gradient(fragment)
            with lent as local:
                deliver(self.store.snapshot(fragment, local, into))
        self._wanted.clear()

    def wait(self, within_s: float) -> bool:
        """Wait for something that the next boundary will do or report; say whether there is."""
        return self._news.wait(within_s)

    def merge_now(self, merge: Merge, access: FragmentAccess) -> None:
        """Merge at once; for the training thread itself."""
        with self._lock:
            self.store.merge_into(access, merge)

    def _next(self) -> list[Waiting]:
        """Return what is to be merged next, all of it or nothing; it stays here until it is."""
        waiting = list(self._merges)
        if self._trial is None:
            return waiting[:1]
        made = [one for one in waiting if not one[0].donor]
        if made or not waiting:
            return made[:1]
        return waiting if self._trial.ready(len(waiting), coming=self.coming) else []

    def _take_in(self, chosen: list[Waiting], access: FragmentAccess) -> int:
        """Merge what is not refused, and report it; return how many were merged."""
        if chosen[0][0].donor and self._trial is not None:
            return self._take_fetched(self._trial, chosen, access)
        [(merge, report)] = chosen
        why = ""
        if self._trial is None:
            self.merge_now(merge, access)
        elif self._is_late(merge):
            report = replace(
                report, outcome="abandoned", reason="its anchor was given up meanwhile"
            )
        else:
            why = self._trial.take_round(merge, access, report.round)
        self._done(chosen, report, why)
        if merge.snapshot is not None and merge.snapshot.values is not merge.anchor.values:
            self._spare = merge.snapshot.values
        return 0 if why else 1

    def _take_fetched(self, trial: Trial, chosen: list[Waiting], access: FragmentAccess) -> int:
        newest = {one[0].fragment: one for one in chosen}
        tried = [
            one
            for one in newest.values()
            if one[0].anchor.stamp.beats(self.store.anchor(one[0].fragment).stamp)
        ]
        kept = {id(one) for one in tried}
        for one in chosen:
            if id(one) not in kept:
                reason = "a better anchor has come meanwhile"
                self._done([one], replace(one[1], outcome="abandoned", reason=reason))
        if not tried:
            return 0
        merges = [merge.as_given() if self._is_late(merge) else merge for merge, _ in tried]
        found = trial.take_fetched(merges, access, coming=self.coming)
        for one, why in zip(tried, found, strict=True):
            if why is not None:
                self._done([one], one[1], why)
        return sum(why == "" for why in found)

    def _is_late(self, merge: Merge) -> bool:
        """Say whether a merge is measured from an anchor that is not in place any more."""
        anchor, snapshot = self.store.anchor(merge.fragment), merge.snapshot
        return snapshot is not None and snapshot.anchor.stamp != anchor.stamp

    def _done(self, merged: list[Waiting], report: RoundReport, why: str = "") -> None:
        if why:
            report = replace(report, outcome="refused", reason=why)
        version = self.store.anchor(report.fragment).stamp.version
        report = replace(report, version=version)
        with self._lock:
            done = {id(one) for one in merged}
            self._merges = deque(one for one in self._merges if id(one) not in done)
            self._reports.append(report)
        for merge, _ in merged:
            if self.store.anchor(merge.fragment) is merge.anchor:
                self.on_merged(merge.anchor)
