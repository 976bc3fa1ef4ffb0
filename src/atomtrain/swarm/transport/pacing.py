"""A limit on what a peer sends, so that its link stays usable for everything else.

A link that is full has a queue, and all that goes over it, others' traffic and the swarm's own
signs of life, waits in that queue. Sending a little less than the link carries keeps it short.
"""

from __future__ import annotations

import asyncio
import math

_GRANT_S = 0.05
"""What may go in one go, in seconds of the limit: what others on the link wait at most."""
_LEAST_GRANT_BYTES = 1400
"""Payload of a packet."""
_MOST_GRANT_BYTES = 1 << 18


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
