"""What joins the ranks of a pipeline: each one's link, and what becomes of messages on it.

A direction of a link carries one message at a time. A shaped link is a *token bucket*: while it is
idle it saves up what it may pass at once later, up to a burst, so short messages with pauses
between them take less time than the rate says. Packets that get lost are sent again, and what came
behind them on the same connection waits (`loss.recovery_s`); with BBR that also slows down what
comes later (`bbr`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from atomresearch.simulation.bbr import BbrConnection
from atomresearch.simulation.loss import BBR, CUBIC, recovery_s

PAYLOAD_SHARE = 0.955
"""What Ethernet, IP and TCP headers leave of a link's rate, with packets of 1500 bytes."""
BOTH_WAYS_SHARE = 1448 / (1514 + 66 / 2)
"""What is left where as much comes as goes: every other packet's acknowledgement goes, too."""
_LOSSY_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class PipelineLink:
    """What joins each rank to the others."""

    bits_per_s: float
    """Rate of each direction of a rank's link; infinity is allowed."""
    one_way_s: float = 0.0
    """Time from the last bit's departure to its arrival."""
    burst_s: float = 0.0
    """An idle link saves up what it carries in this time, and passes that at once."""
    loss_share: float = 0.0
    """Of packets, each lost by itself; 0 to below 1. The rate is what is left of it then."""
    congestion_control: str = CUBIC
    """Of the connections, by Linux's name; where packets get lost it says how BBR's are paced."""


class Sent(NamedTuple):
    """What became of a message."""

    left_s: float
    """When both ends' links are free for the next one."""
    arrived_s: float


def mean_step_s(run: Callable[[], float], link: PipelineLink) -> float:
    """Return the seconds of a step over connections that are open already.

    With BBR where packets get lost it is the mean of several, since chance differs, after a first
    one, in which connections find their rate.

    Args:
        run: Runs one more step and returns when it ends, counted from the first one's start.
        link: As the steps have it.
    """
    first_s = run()
    if not link.loss_share or link.congestion_control != BBR:
        return first_s
    for _ in range(_LOSSY_STEPS - 1):
        last_s = run()
    return (last_s - first_s) / (_LOSSY_STEPS - 1)


class Lanes:
    """Both directions of all ranks' links, each carrying one message after the other.

    Losses are drawn in the order of the messages, the same ones each time.
    """

    def __init__(self, ranks: int, link: PipelineLink) -> None:
        self.link = link
        # By these times a link has passed all that it took, at its rate and without a break. One
        # that lies in the past is what the link has saved up.
        self._up_s, self._down_s = [0.0] * ranks, [0.0] * ranks
        self._behind_s: dict[tuple[int, int], float] = {}
        """When the last message of each connection had arrived."""
        self._chance = random.Random(0)
        self._bbr: dict[tuple[int, int], BbrConnection] = {}

    def free_s(self, source: int, target: int) -> float:
        """Return from when on a message could leave."""
        return max(self._up_s[source], self._down_s[target])

    def send(self, source: int, target: int, message_bytes: float, now_s: float) -> Sent:
        """Send as soon as the links are free; calls for the same link come in the order of time."""
        start_s = max(now_s, self.free_s(source, target))
        self._take(source, target, message_bytes, start_s)
        left_s = max(start_s, self.free_s(source, target))
        return Sent(left_s, self._arrived_s(source, target, message_bytes, start_s, left_s))

    def up_free_s(self, source: int) -> float:
        """Return from when on a rank could send a piece."""
        return self._up_s[source]

    def send_piece(self, source: int, target: int, piece_bytes: float, now_s: float) -> Sent:
        """Send as soon as the source's link is free; the piece may have to wait at the target's.

        `Sent.left_s` is then when the source's link is free again.
        """
        start_s = max(now_s, self._up_s[source])
        self._take(source, target, piece_bytes, start_s)
        left_s = max(start_s, self._up_s[source])
        down_s = max(left_s, self._down_s[target])
        return Sent(left_s, self._arrived_s(source, target, piece_bytes, start_s, down_s))

    def _take(self, source: int, target: int, sent_bytes: float, start_s: float) -> None:
        takes_s = 8 * sent_bytes / self.link.bits_per_s
        saved_s = start_s - self.link.burst_s
        self._up_s[source] = max(self._up_s[source], saved_s) + takes_s
        self._down_s[target] = max(self._down_s[target], saved_s) + takes_s

    def _arrived_s(
        self, source: int, target: int, sent_bytes: float, start_s: float, left_s: float
    ) -> float:
        """Return when what has left by `left_s` is there, with what was lost of it."""
        link = self.link
        arrived_s = left_s + link.one_way_s
        if link.loss_share and link.congestion_control == BBR:
            return max(arrived_s, self._paced(source, target).send(sent_bytes, start_s))
        if link.loss_share:
            arrived_s += recovery_s(sent_bytes, link.loss_share, 2 * link.one_way_s, self._chance)
            arrived_s = max(arrived_s, self._behind_s.get((source, target), 0.0))
            self._behind_s[source, target] = arrived_s
        return arrived_s

    def _paced(self, source: int, target: int) -> BbrConnection:
        link, key = self.link, (source, target)
        if key not in self._bbr:
            full_bits_per_s = link.bits_per_s / (1 - link.loss_share)
            self._bbr[key] = BbrConnection(
                full_bits_per_s, 2 * link.one_way_s, link.loss_share, self._chance
            )
        return self._bbr[key]
