"""Deadlines, derived from what was measured: members' step times and the rounds so far.

| wait | deadline |
|---|---|
| a member's answer to an invitation | 2 of the slowest member's steps, and a fetch |
| fetching an anchor | as an exchange of its size, or twice what the slowest behind has needed |
| exchange of all slices | 4 times what the slowest of recent rounds would take, and the floor |
| slices of contributors, at their owner | half of the exchange |
| the leader's decision | the exchange and the floor |

Claims of being slow count up to 8 times the usual step, and 20 times the usual fetch.
Before the first exchange, the configured slowest link stands in for the measurement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

_STEPS = 2.0
_EXCHANGES = 4.0
_REMEMBERED = 8
_OUTLIERS = 1
_FETCHES = 2.0
_SLOWER, _SLOWER_FETCH = 8.0, 20.0
"""A member that claims to be so many times slower than is usual is not waited for any longer."""
_TELLING_BYTES = 1 << 10


class RoundTiming:
    """Turns measurements into deadlines between a floor and a ceiling."""

    def __init__(
        self, *, floor_s: Callable[[], float], ceiling_s: float, slowest_bytes_per_s: float
    ) -> None:
        """Start without measurements; `floor_s` returns the floor as it is now, see `waits`."""
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._assumed_s_per_byte = 1 / slowest_bytes_per_s
        self._s_per_byte: deque[float] = deque(maxlen=_REMEMBERED)
        self._rounds_s: deque[float] = deque(maxlen=_REMEMBERED)
        self.fetch_bytes_per_s = 0.0
        """Rate of the last fetch of an anchor; 0 before one was measured."""
        self.moved_bytes = 0
        """Bytes that exchanges have moved each way, ever."""
        self.fetched_bytes = 0
        """Bytes that came of anchors from donors, ever."""

    @property
    def floor_s(self) -> float:
        """No part of a round is given less time."""
        return min(self._floor_s(), self._ceiling_s)

    def answer_s(self, step_s: Iterable[float]) -> float:
        """Return how long members with these step times may take to hand over a snapshot."""
        steps = sorted(step_s)
        if not steps:
            return self._bounded(self.floor_s)
        slowest_s = min(steps[-1], _SLOWER * steps[len(steps) // 2])
        return self._bounded(self.floor_s + _STEPS * slowest_s)

    def fetch_s(self, anchor_bytes: int, rates_bytes_per_s: Iterable[float]) -> float:
        """Return how long members may take to fetch an anchor; 0 is a rate not measured yet.

        Who once was too slow is given twice the time that its link has shown to need: so nobody
        is left behind for good.
        """
        slowest = min((rate for rate in rates_bytes_per_s if rate > 0), default=0.0)
        usual_s = self.exchange_s(anchor_bytes)
        needed_s = _FETCHES * anchor_bytes / slowest if slowest else 0.0
        return self._bounded(max(usual_s, min(needed_s, _SLOWER_FETCH * usual_s)))

    def exchange_s(self, wire_bytes: int) -> float:
        """Return how long a member may take to move `wire_bytes` each way."""
        s_per_byte = max(self._s_per_byte, default=self._assumed_s_per_byte)
        return self._bounded(self.floor_s + _EXCHANGES * s_per_byte * wire_bytes)

    def observe(self, wire_bytes: int, seconds: float) -> None:
        """Learn from an exchange that came to its end."""
        self.moved_bytes += wire_bytes
        if wire_bytes > 0:
            self._s_per_byte.append(seconds / wire_bytes)

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate of the fastest of recent exchanges; 0 before one was measured."""
        fastest = min((s for s in self._s_per_byte if s > 0), default=0.0)
        return 1 / fastest if fastest else 0.0

    def observe_fetch(self, received_bytes: int, seconds: float) -> None:
        """Learn from a fetch, complete or cut off, how fast anchors come here."""
        self.fetched_bytes += received_bytes
        if received_bytes >= _TELLING_BYTES and seconds > 0:
            self.fetch_bytes_per_s = received_bytes / seconds

    def failed(self) -> None:
        """Learn that an exchange ran into its deadline: be more patient next time."""
        self._s_per_byte.append(2 * max(self._s_per_byte, default=self._assumed_s_per_byte))

    def observe_round(self, seconds: float) -> None:
        """Learn how long a round took from invitation to decision."""
        self._rounds_s.append(seconds)

    @property
    def round_s(self) -> float:
        """Return the second longest of the last eight rounds; 0 before two were measured."""
        longest = sorted(self._rounds_s, reverse=True)
        return longest[_OUTLIERS] if len(longest) > _OUTLIERS else 0.0

    def _bounded(self, value_s: float) -> float:
        return min(value_s, self._ceiling_s)
