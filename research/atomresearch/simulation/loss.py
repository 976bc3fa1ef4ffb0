"""What a TCP connection carries: where packets get lost at random, and at its beginning.

Each loss halves the window (CUBIC: takes 0.3 of it), so the window that is left on average falls
with the share that is lost, and a window goes out once in each round trip. Reno's average is that
of Mathis et al. 1997 (ACM CCR 27(3), equation 3); CUBIC's that of RFC 9438, section 5.1, and never
below Reno's, as its own rules make sure. BBR does not look at losses (Cardwell et al. 2016, ACM
Queue 14(5): full rate up to several percent), as long as it always has something to send: what it
makes of messages with pauses is in `bbr`.
"""

from __future__ import annotations

import math
import random

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
