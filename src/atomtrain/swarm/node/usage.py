"""How much of a peer's link is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from atomtrain.swarm.rounds.timing import RoundTiming

_WINDOW_S = 60.0


class Usage:
    """Compares what was moved in the last minute with what the link can move."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that only grow."""
        self._clock = clock
        self._moved: deque[tuple[float, int]] = deque([(clock(), 0)])

    def free_bytes_per_s(self, timing: RoundTiming) -> float:
        """Return the rate that is left, each way; 0 before a round was measured."""
        now_s = self._clock()
        self._moved.append((now_s, timing.moved_bytes))
        while len(self._moved) > 2 and self._moved[1][0] < now_s - _WINDOW_S:
            self._moved.popleft()
        (since_s, before_bytes), link = self._moved[0], timing.link_bytes_per_s
        used = (timing.moved_bytes - before_bytes) / max(now_s - since_s, 1.0)
        return max(0.0, link - used)
