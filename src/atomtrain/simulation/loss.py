"""What a TCP connection carries where packets get lost at random.

Each loss halves the window (CUBIC: takes 0.3 of it), so the window that is left on average falls
with the share that is lost, and a window goes out once in each round trip. Reno's average is that
of Mathis et al. 1997 (ACM CCR 27(3), equation 3); CUBIC's that of RFC 9438, section 5.1, and never
below Reno's, as its own rules make sure.
"""

from __future__ import annotations

import math

_SEGMENT_BYTES = 1448
"""Payload of a packet of 1500 bytes with time stamps."""


def connection_bits_per_s(bits_per_s: float, round_trip_s: float, loss_share: float) -> float:
    """Return the payload rate of one connection on a link whose payload rate is `bits_per_s`.

    Args:
        bits_per_s: What the link carries of payload; infinity is allowed.
        round_trip_s: Without queues; 0 stands for one so short that no window limits anything.
        loss_share: Of packets, each lost by itself; 0 to below 1.
    """
    arriving = bits_per_s * (1 - loss_share)
    if loss_share == 0 or round_trip_s == 0:
        return arriving
    reno = math.sqrt(1.5 / loss_share)
    cubic = 1.054 * math.pow(round_trip_s / loss_share, 0.75)
    return min(arriving, max(reno, cubic) * 8 * _SEGMENT_BYTES / round_trip_s)
