"""Streams inside one process: those of a peer with itself.

Bytes take `delay_s()` to arrive, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from atomtrain.swarm.transport.transport import Channel, StreamChannel


class Pipe:
    """One direction of a stream; `close` ends it for both."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self.reader = asyncio.StreamReader(limit=1 << 30)
        self.other: Pipe | None = None
        self._delay_s = delay_s
        self._last_s = 0.0
        self._under_way: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed:
            raise ConnectionResetError("closed")
        self._later(self.reader.feed_data, bytes(data))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._later(self.reader.feed_eof)
            if self.other is not None:
                self.other.close()

    def _later(self, call: Callable[..., None], *args: object) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._delay_s())
        # Timers of one instant fire in any order: each takes the oldest, not its own.
        self._under_way.append((call, args))
        loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        call, args = self._under_way.popleft()
        call(*args)


def no_delay() -> float:
    """Return 0: bytes arrive at once."""
    return 0.0


def pipe_pair(delay_s: Callable[[], float]) -> tuple[Pipe, Pipe]:
    """Return the two directions of a stream."""
    one, other = Pipe(delay_s), Pipe(delay_s)
    one.other, other.other = other, one
    return one, other


def channel_pair(
    first: str, second: str, stall_s: float, delay_s: Callable[[], float] = no_delay
) -> tuple[Channel, Channel]:
    """Return the two ends of a stream: the one `first` holds, and the one `second` holds."""
    to_first, to_second = pipe_pair(delay_s)
    return (
        StreamChannel(second, to_first.reader, to_second, stall_s),
        StreamChannel(first, to_second.reader, to_first, stall_s),
    )
