"""Rates: the limit on what a peer sends, and what its link has left.

A link that is full has a queue, and all that goes over it, others' traffic and the swarm's own
signs of life, waits in that queue. Sending a little less than the link carries keeps it short.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

_GRANT_S = 0.05
"""What may go in one go, in seconds of the limit: what others on the link wait at most."""
_LEAST_GRANT_BYTES = 1400
"""Payload of a packet."""
_MOST_GRANT_BYTES = 1 << 18
_WINDOW_S = 60.0


class Pacer:
    """Hands out the right to send, first come, first served, at a limited rate."""

    def __init__(self, limit_bytes_per_s: float = math.inf) -> None:
        """Limit to so many bytes a second in all; above 0, and infinite for no limit."""
        self.limit_bytes_per_s = limit_bytes_per_s
        """May be changed at any time."""
        self._free_s = 0.0

    @property
    def limited(self) -> bool:
        """Whether there is a limit now."""
        return not math.isinf(self.limit_bytes_per_s)

    @property
    def grant_bytes(self) -> int:
        """Ask for this many bytes at most."""
        grant_bytes = min(_GRANT_S * self.limit_bytes_per_s, _MOST_GRANT_BYTES)
        return max(int(grant_bytes), _LEAST_GRANT_BYTES)

    async def turn(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may go."""
        if not self.limited:
            return
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size_bytes / self.limit_bytes_per_s
        if begin_s > now_s:
            await asyncio.sleep(begin_s - now_s)


class Usage:
    """Compares what was moved in the last minute with what the link can move."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds that only grow."""
        self._clock = clock
        self._moved: deque[tuple[float, int]] = deque([(clock(), 0)])

    def free_bytes_per_s(self, moved_bytes: int, link_bytes_per_s: float) -> float:
        """Return the rate that is left, each way.

        Args:
            moved_bytes: What was moved each way, ever.
            link_bytes_per_s: What the link can move; 0 before it was measured.
        """
        now_s = self._clock()
        self._moved.append((now_s, moved_bytes))
        while len(self._moved) > 2 and self._moved[1][0] < now_s - _WINDOW_S:
            self._moved.popleft()
        since_s, before_bytes = self._moved[0]
        used = (moved_bytes - before_bytes) / max(now_s - since_s, 1.0)
        return max(0.0, link_bytes_per_s - used)
