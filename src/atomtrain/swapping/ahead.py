"""The next step's first segments come to the device while this step's last ones compute.

Towards the end of backward slots fall free that the step needs no more, and the link has time:
backward computes longer for each byte than forward does. So each such slot takes one of the
segments with which the next step begins, as soon as that is updated. Backward updates the first
segment last; so it gets the slot that falls free last, the second one the slot before, and so on.
That slots go to other segments than in the step before is no matter: they are all alike.

What came is of use only if the next pass is a step and nobody wrote to the host's parameters in
between; else it is forgotten, and comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from atomtrain.planning.schedule import Phase, Visit, hand_overs
from atomtrain.planning.shape import Layers
from atomtrain.swapping.streams import Event, Job


class Coming(NamedTuple):
    """A segment of the next step that may come now."""

    visit: int
    """Index of its visit there."""
    slot: int
    """The device's slot that it comes to."""


class Ahead:
    """Which slots of the device a step's visits have, and what comes for the step after it."""

    def __init__(self, slots: int) -> None:
        self._order = list(range(slots))
        self._visits: Sequence[Visit] = ()
        self._came: dict[int, Event] = {}
        self._waiting: list[tuple[int, Coming]] = []
        self._next_order: list[int] = []
        self._wanted = _Wanted()

    def slot(self, number: int) -> int:
        """Return the device's slot that has a number in the visits of this pass."""
        return self._order[number]

    def begin(self, visits: Sequence[Visit]) -> dict[int, Event]:
        """Start a pass; return the loads that came ahead for it, by the visit's index."""
        came = {}
        if visits is self._visits and self._came:
            came, self._came = self._came, {}
            self._order = self._next_order
        else:
            self.forget()
        self._visits = visits
        self._plan()
        return came

    def expects(self, layers: Layers) -> bool:
        """Return whether a segment still has to come for the next step."""
        return any(self._visits[coming.visit].layers == layers for _, coming in self._waiting)

    def may_come(self, done: int, ready: Callable[[Visit], bool]) -> list[Coming]:
        """Return what may come once visit `done` is over; each is returned once.

        Args:
            done: Index of the visit.
            ready: Whether all that a visit loads is updated, or will be without more visits.
        """
        now = [
            coming
            for last, coming in self._waiting
            if last <= done and ready(self._visits[coming.visit])
        ]
        self._waiting = [(last, coming) for last, coming in self._waiting if coming not in now]
        return now

    def note(self, coming: Coming, event: Event) -> None:
        """Take note of a load that was submitted."""
        self._came[coming.visit] = event

    def while_wanted(self, job: Job) -> Job:
        """Return a job that does nothing if, when its turn comes, all was forgotten."""
        wanted = self._wanted

        def copy() -> None:
            if wanted.still:
                job()

        return copy

    def forget(self) -> None:
        """Let what came come again; blocks until nothing of it is on its way.

        Raises:
            StreamError: a load, or an update before it, failed.
        """
        self._wanted.still = False
        self._wanted = _Wanted()
        came, self._came = self._came, {}
        for event in came.values():
            event.wait()

    def wait(self) -> None:
        """Block until nothing is on its way.

        Raises:
            StreamError: a load, or an update before it, failed.
        """
        for event in self._came.values():
            event.wait()

    def _plan(self) -> None:
        """Say what comes to which slot, and when it falls free."""
        self._next_order = list(self._order)
        self._waiting = []
        for over in hand_overs(self._visits):
            place = self._order[over.slot]
            self._next_order[self._visits[over.visit].slot] = place
            self._waiting.append((over.free_after, Coming(over.visit, place)))
        if not any(visit.phase is Phase.TURN for visit in self._visits):
            self._waiting = []  # an evaluation


class _Wanted:
    """Says to jobs that wait in a stream whether anybody still wants what they bring."""

    still = True


def ahead_of(label: str) -> str:
    """Return what traces call a load that is for the next step."""
    return f"{label} (next step)"
