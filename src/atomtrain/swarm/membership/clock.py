"""The swarm's time: that of its founder, whatever the clocks of the machines say.

Records expire by comparing times of different machines. So a newcomer measures, when it asks for
the manifest, how far its clock is from that of the peer it asks, and reckons in that peer's time
from then on. The reckoning goes by a clock that nobody sets, and that goes on while a machine
sleeps: correcting the time of day, or closing a laptop, does no harm.
"""

from __future__ import annotations

import time


class SwarmClock:
    """Seconds since 1970 as the swarm counts them; call it to read it."""

    def __init__(self, offset_s: float = 0.0, error_s: float = 0.0) -> None:
        """`offset_s`: by how much the swarm's time is ahead of this machine's, `error_s` at most
        more or less."""
        self.offset_s, self.error_s = offset_s, error_s
        self._base_s = time.time() + offset_s - _steady_s()

    @classmethod
    def measured(cls, asked_s: float, told_s: float, answered_s: float) -> SwarmClock:
        """Return the clock of a peer that was asked for its time.

        Args:
            asked_s: This machine's time when the question left.
            told_s: The swarm's time in the answer. It is off by half the round trip at most.
            answered_s: This machine's time when the answer came.
        """
        return cls(told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)

    def __call__(self) -> float:
        """Return the swarm's time."""
        return self._base_s + _steady_s()


def _steady_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
