"""Delays and loses packets between the ports of a switch: a process, for kernels without netem.

It has one tap device for each host, reads whole frames from it (with the kernel's offloads, so a
frame may hold 64 KiB, and hosts send large ones: `Link.tso_rtt_log`), keeps each for the delay, and
writes it to the tap of the host that it is for. Standard input carries, one line each time, the
delay in seconds and the share of frames that is lost; at its end the process ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_SET_OFFLOAD = 0x400454D0  # TUNSETOFFLOAD
_TAP, _NO_INFORMATION, _OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 1, 2, 4
_HEADER_BYTES = 10
"""What the kernel puts before each frame to say what is left undone of checksum and segments."""
_TARGET = slice(_HEADER_BYTES, _HEADER_BYTES + 6)
_SENDER = slice(_TARGET.stop, _TARGET.stop + 6)
_MOST_FRAME_BYTES = 80_000
_MOST_WAITING_BYTES = 256 << 20
_AT_ONCE = 64
_TOGETHER_S = 0.0005
"""Frames that come within it are read together: to wake up for each costs more than passing it on.

So a frame may be kept longer than the delay by that much, and is never kept shorter.
"""


class DelayQueue:
    """Frames on their way, first in first out; each has a time at which it is due."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.loss_share = 0.0
        self.waiting_bytes = 0
        self._chance = random.Random(1)
        self._frames: deque[tuple[float, int, bytes]] = deque()

    def put(self, now_s: float, source: int, frame: bytes) -> bool:
        """Take a frame from port `source`; return whether it is on its way, and not lost."""
        if self.loss_share and self._chance.random() < self.loss_share:
            return False
        if self.waiting_bytes + len(frame) > _MOST_WAITING_BYTES:
            return False
        self.waiting_bytes += len(frame)
        self._frames.append((now_s + self.delay_s, source, frame))
        return True

    def due(self, now_s: float) -> tuple[int, bytes] | None:
        """Return and remove the oldest frame if its time has come, with its source."""
        if not self._frames or self._frames[0][0] > now_s:
            return None
        _, source, frame = self._frames.popleft()
        self.waiting_bytes -= len(frame)
        return source, frame

    def wait_s(self, now_s: float) -> float | None:
        """Return how long it is until a frame is due; `None` without frames."""
        return max(0.0, self._frames[0][0] - now_s) if self._frames else None


class Ports:
    """Which hosts are behind which port: learnt from the frames, as a switch does."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen: dict[bytes, int] = {}

    def targets(self, source: int, frame: bytes) -> list[int]:
        """Return the ports that a frame goes to, and learn where its sender is."""
        target, sender = frame[_TARGET], frame[_SENDER]
        self._seen[sender] = source
        if target in self._seen:
            port = self._seen[target]
            return [] if port == source else [port]
        return [port for port in range(self._count) if port != source]


def open_tap(name: str) -> int:
    """Return the descriptor of a new tap device in this namespace, non-blocking."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_INFORMATION | _OFFLOAD_HEADER
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, _SET_OFFLOAD, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
    return tap


def relay(taps: list[int], control: int) -> None:
    """Pass frames on until `control` ends."""
    queue, ports = DelayQueue(), Ports(len(taps))
    port_of = {tap: port for port, tap in enumerate(taps)}
    while True:
        now_s = time.monotonic()
        while (entry := queue.due(now_s)) is not None:
            source, frame = entry
            for port in ports.targets(source, frame):
                _write(taps[port], frame)
        readable, _, _ = select.select([control, *taps], [], [], queue.wait_s(now_s))
        now_s = time.monotonic()
        for descriptor in readable:
            if descriptor == control:
                text = os.read(control, 4096)
                if not text:
                    return
                queue.delay_s, queue.loss_share = map(float, text.splitlines()[-1].split())
            else:
                for frame in _frames(descriptor):
                    queue.put(now_s, port_of[descriptor], frame)
        next_s = queue.wait_s(now_s)
        if next_s is not None:
            time.sleep(min(next_s, _TOGETHER_S))


def _frames(tap: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < _AT_ONCE:
        try:
            frames.append(os.read(tap, _MOST_FRAME_BYTES))
        except OSError:  # nothing more to read, or the device is down
            break
    return frames


def _write(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:  # the device's queue is full, or it is down: a packet is lost
        return


def main() -> None:
    """Open the taps, say so, and relay."""
    try:
        taps = [open_tap(f"t{port}") for port in range(int(sys.argv[1]))]
    except OSError:  # whoever started this says what it means
        sys.exit(1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(taps, sys.stdin.fileno())


if __name__ == "__main__":
    main()
