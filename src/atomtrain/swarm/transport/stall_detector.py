"""For how long a peer's event loop does not run: all that has a deadline may miss it then."""

from __future__ import annotations

import asyncio
import math
from collections import deque

_LOOK_S = 0.25
_WINDOW_S, _WINDOWS = 60.0, 10
"""What counts as lately: so many windows."""


class Stillness:
    """Notices for how long its event loop did not run: all that has a deadline may have missed it.

    It makes no difference to a deadline whether the machine stood still, the process was stopped,
    others had the processor, or something blocked the loop.
    """

    def __init__(self, asleep_s: float = math.inf) -> None:
        """Begin at the first look; who stands still for `asleep_s` sleeps, which is another thing.

        Others count it as gone then, and it enters again: no deadline could be that long.
        """
        self._asleep_s = asleep_s
        self._seen_s: float | None = None
        self._longest: deque[float] = deque([0.0], maxlen=_WINDOWS)
        self._window_ends_s = 0.0

    async def watch(self) -> None:
        """Look again and again; runs until it is cancelled."""
        self.look()
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> float:
        """Return the longest time lately for which the loop did not run, in seconds."""
        now_s = asyncio.get_running_loop().time()
        if self._seen_s is None:
            self._seen_s, self._window_ends_s = now_s - _LOOK_S, now_s + _WINDOW_S
        still_s = now_s - self._seen_s - _LOOK_S
        self._seen_s = now_s
        if now_s >= self._window_ends_s:
            self._longest.append(0.0)
            self._window_ends_s = now_s + _WINDOW_S
        if still_s < self._asleep_s:
            self._longest[-1] = max(self._longest[-1], still_s)
        return self.longest_s

    @property
    def longest_s(self) -> float:
        """The longest time lately, as of the last look."""
        return max(self._longest)
