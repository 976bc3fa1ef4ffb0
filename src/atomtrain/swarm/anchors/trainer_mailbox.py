"""The mailbox between the training thread and the network thread, and what lies in it.

The network side leaves requests (a snapshot, an anchor to merge); the training thread serves them
at its next boundary, between two steps, and leaves its progress. Nobody has to wait for the other
here; a trainer that has nothing else to do can.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore, FragmentAccess, GradientAccess
from atomtrain.swarm.anchors.anchors import Merge, Snapshot
from atomtrain.swarm.anchors.stamps import Stamp

_log = logging.getLogger("atomtrain.swarm")


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
    """`averaged`: all slices and members; `partial`: some; `abandoned`; `fetched` from a peer."""
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


class TrainerMailbox:
    """Thread-safe mailbox and owner of the anchor store."""

    def __init__(self, store: AnchorStore, on_boundary: Callable[[int, int], None]) -> None:
        """Call `on_boundary(steps, merges)` on the training thread after each boundary."""
        self.store = store
        self._on_boundary = on_boundary
        self._lock = threading.RLock()
        self._news = threading.Event()  # changed under the lock
        self._wanted: dict[int, tuple[torch.Tensor, Callable[[Snapshot], None]]] = {}
        self._merges: deque[tuple[Merge, RoundReport]] = deque()
        self._reports: deque[RoundReport] = deque(maxlen=1000)
        self._progress = LocalProgress()
        self._spare: torch.Tensor | None = None

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
            merges = self._merge_all(access)
            for fragment, (into, deliver) in self._wanted.items():
                lent = access.view(fragment)
                if self.store.gradients:
                    lent = cast(GradientAccess, access).gradient(fragment)
                with lent as local:
                    deliver(self.store.snapshot(fragment, local, into))
            self._wanted.clear()
            reports = list(self._reports)
            self._reports.clear()
        self._on_boundary(steps, merges)
        return reports

    def wait(self, within_s: float) -> bool:
        """Wait for something that the next boundary will do or report; say whether there is."""
        return self._news.wait(within_s)

    def merge_now(self, merge: Merge, access: FragmentAccess) -> None:
        """Merge at once; for the training thread itself."""
        with self._lock:
            with access.view(merge.fragment) as local:
                self.store.check_size(merge.fragment, local)
                self.store.merge(merge, local)
            if self.store.gradients:
                cast(GradientAccess, access).forget(merge.fragment)

    def _merge_all(self, access: FragmentAccess) -> int:
        count = len(self._merges)
        while self._merges:
            merge, report = self._merges.popleft()
            self.merge_now(merge, access)
            if merge.snapshot is not None and merge.snapshot.values is not merge.anchor.values:
                self._spare = merge.snapshot.values
            self._reports.append(report)
        return count
