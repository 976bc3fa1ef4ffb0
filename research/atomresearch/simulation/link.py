"""What joins the ranks of a pipeline: each one's link, and what becomes of messages on it.

A direction of a link carries one message at a time. A shaped link is a *token bucket*: while it is
idle it saves up what it may pass at once later, up to a burst, so short messages with pauses
between them take less time than the rate says. Packets that get lost are sent again, and what came
behind them on the same connection waits (`recovery_s`); with BBR that also slows down what
comes later (`bbr`).

Packets get lost at random. Each loss halves the window (CUBIC: takes 0.3 of it), so the window that
is left on average falls with the share that is lost, and a window goes out once in each round trip.
Reno's average is that of Mathis et al. 1997 (ACM CCR 27(3), equation 3); CUBIC's that of RFC 9438,
section 5.1, and never below Reno's, as its own rules make sure. BBR does not look at losses
(Cardwell et al. 2016, ACM Queue 14(5): full rate up to several percent), as long as it always has
something to send: what it makes of messages with pauses is in `bbr`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from atomresearch.simulation.bbr import BbrConnection

BBR, CUBIC = "bbr", "cubic"
"""Congestion controls by Linux's names."""
_SEGMENT_BYTES = 1448
"""Payload of a packet of 1500 bytes with time stamps."""
_FIRST_SEGMENTS = 10
"""Of a new connection's window: RFC 6928."""
_NEVER = 1e-12


def connection_bits_per_s(
    bits_per_s: float, round_trip_s: float, loss_share: float, control: str = CUBIC
) -> float:
    """Return the payload rate of one connection on a link whose payload rate is `bits_per_s`.

    Args:
        bits_per_s: What the link carries of payload; infinity is allowed.
        round_trip_s: Without queues; 0 stands for one so short that no window limits anything.
        loss_share: Of packets, each lost by itself; 0 to below 1.
        control: Its congestion control, by Linux's name; all but `BBR` count as CUBIC.
    """
    arriving = bits_per_s * (1 - loss_share)
    if loss_share == 0 or round_trip_s == 0 or control == BBR:
        return arriving
    reno = math.sqrt(1.5 / loss_share)
    cubic = 1.054 * math.pow(round_trip_s / loss_share, 0.75)
    return min(arriving, max(reno, cubic) * 8 * _SEGMENT_BYTES / round_trip_s)


def opening_s(payload_bytes: float, bits_per_s: float, round_trip_s: float, streams: int) -> float:
    """Return how much longer so many bytes take on new connections than on open ones.

    The window begins with ten packets and doubles with each round trip until it fills the link
    (slow start: RFC 5681), so the link is idle for a part of each of the first round trips.

    Args:
        payload_bytes: Of all connections together.
        bits_per_s: Payload rate of the link that they share; infinity is allowed.
        round_trip_s: Without queues.
        streams: Number of connections, at least 1.
    """
    window_bytes = float(streams * _FIRST_SEGMENTS * _SEGMENT_BYTES)
    lost_s, left_bytes = 0.0, payload_bytes
    while left_bytes > window_bytes and 8 * window_bytes / bits_per_s < round_trip_s:
        lost_s += round_trip_s - 8 * window_bytes / bits_per_s
        left_bytes -= window_bytes
        window_bytes *= 2
    return lost_s


def mean_recovery_s(payload_bytes: float, loss_share: float, round_trip_s: float) -> float:
    """Return `recovery_s` on average, but for the last packet's second round trip.

    With n packets and the share p, the worst one needs more than t round trips with the probability
    1 - (1 - p^(t+1))^n.
    """
    packets, again = _packets(payload_bytes), loss_share
    trips = 0.0
    while again > _NEVER:
        trips += -math.expm1(packets * math.log1p(-again))
        again *= loss_share
    return trips * round_trip_s


def recovery_s(
    payload_bytes: float, loss_share: float, round_trip_s: float, chance: random.Random
) -> float:
    """Return how much later a message is whole because packets of it were lost, by chance.

    Acknowledgements of what was sent behind a lost packet tell of it a round trip after it was
    sent, and it is sent again; behind the last one nothing need follow, and the sender asks after
    two round trips (RFC 8985, sections 6 and 7). What is lost once more costs one more round trip.
    All packets of a message are mended at the same time.

    Args:
        payload_bytes: Of the message.
        loss_share: Of packets, each lost by itself; 0 to below 1.
        round_trip_s: Without queues.
        chance: Where losses come from.
    """
    packets = _packets(payload_bytes)
    worst = 0
    for packet in range(packets):
        trips = 0
        while chance.random() < loss_share:
            trips += 2 if trips == 0 and packet == packets - 1 else 1
        worst = max(worst, trips)
    return worst * round_trip_s


def _packets(payload_bytes: float) -> int:
    return max(1, math.ceil(payload_bytes / _SEGMENT_BYTES))


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
