"""A TCP connection with BBR, packet by packet: what it makes of messages with pauses between them.

BBR sends at the largest rate at which it has lately seen data delivered. Of a lone message of n
bytes it sees n / (round trip + n / its rate), which is less than its rate. That does not lower the
estimate as long as all that was handed over is on its way. But where packets get lost data waits,
samples count, and the estimate falls towards the rate at which the application hands messages over:
these then take up all the time between them, whatever the link could carry.

The rules are those of version 1 as its draft has them (draft-cardwell-iccrg-bbr-congestion-control
-00, sections 4.1 to 4.3; samples: draft-cheng-iccrg-delivery-rate-estimation-00; how losses are
found: RFC 8985). Left out: delayed acknowledgements, and queues that overflow.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import deque
from typing import NamedTuple

_SEGMENT_BYTES = 1448
_FIRST_SEGMENTS, _LEAST_SEGMENTS, _SPARE_SEGMENTS = 10, 4, 3
_STARTUP_GAIN, _WINDOW_GAIN = 2.885, 2.0
_CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
_FULL_GROWTH, _FULL_ROUNDS = 1.25, 3
_FILTER_ROUNDS = 10
_PASSED = 3
"""So many later packets acknowledged prove a loss at once; fewer after a quarter round trip."""
_LEAST_RETRY_S = 0.2
"""Of the last packet, if no other is on its way: Linux's least time-out."""
_MARGIN = 0.99
_LOOK_EVERY_S, _LOOK_S = 10.0, 0.2
"""So often, and so long, it sends next to nothing to see the round trip without queues."""


class _Sent(NamedTuple):
    """What is noted of a packet when it leaves."""

    left_s: float
    delivered: int
    delivered_s: float
    first_left_s: float
    of_application: bool
    """Nothing else waited: its sample says what there was to send, not what the path carries."""


class _Event(NamedTuple):
    at_s: float
    order: int
    what: str
    """`acknowledged`, `late` (a later packet has passed it) or `asked` (nothing came after it)."""
    packet: int
    left_s: float
    """Of the packet's try that this is about."""


class BbrConnection:
    """One direction of a connection; rates are in packets a second. Calls come in order of time."""

    def __init__(
        self, bits_per_s: float, round_trip_s: float, loss_share: float, chance: random.Random
    ) -> None:
        """Open it; `bits_per_s` is the link's payload rate, `round_trip_s` is without queues."""
        self._rate = bits_per_s / 8 / _SEGMENT_BYTES
        self._trip_s, self._loss_share, self._chance = round_trip_s, loss_share, chance
        self._now_s = self._link_free_s = self._next_s = 0.0
        self._packets = 0
        self._losses: dict[int, int] = {}
        """How often each packet that has not arrived will still get lost."""
        self._whole_s = 0.0
        """When all that is known to arrive has arrived."""
        self._promised_s = 0.0
        """When the last message is said to arrive."""
        self._unsent: deque[int] = deque()
        self._again: deque[int] = deque()
        self._flight: dict[int, _Sent] = {}
        """In the order of leaving; without those that are known to be lost."""
        self._passed: dict[int, int] = {}
        """By how many later packets each packet of a flight was passed."""
        self._events: list[_Event] = []
        self._made = 0
        self._delivered = self._round = self._round_ends = 0
        self._delivered_s = self._first_left_s = 0.0
        self._application_until = 0
        self._samples: deque[tuple[int, float]] = deque()
        self._pace = _STARTUP_GAIN * _FIRST_SEGMENTS / max(round_trip_s, 1e-3)
        self._window = self._window_before = float(_FIRST_SEGMENTS)
        self._mode, self._full, self._full_rounds = "startup", 0.0, 0
        self._phase, self._phase_s = 2, 0.0
        self._recovers_at: int | None = None
        """Recovery ends when so many packets have been delivered."""
        self._conserving = False
        # Connections do not look at the same time.
        self._looks_s = _LOOK_EVERY_S * chance.random()
        self._looks_until_s = 0.0

    def send(self, payload_bytes: float, now_s: float) -> float:
        """Hand over a message; return when all of it has arrived, and all before it."""
        self._run(now_s)
        if not self._unsent and not self._again and len(self._flight) < self._window:
            self._application_until = max(1, self._delivered + len(self._flight))
        for _ in range(max(1, math.ceil(payload_bytes / _SEGMENT_BYTES))):
            lost = 0
            while self._chance.random() < self._loss_share:
                lost += 1
            self._losses[self._packets] = lost
            self._unsent.append(self._packets)
            self._packets += 1
        # What is handed over later changes nothing for this message but how soon losses are found.
        ahead = self._fork()
        ahead._run(math.inf)
        self._promised_s = max(self._promised_s, ahead._whole_s)
        return self._promised_s

    def _fork(self) -> BbrConnection:
        twin = copy.copy(self)
        twin._losses, twin._flight = dict(self._losses), dict(self._flight)
        twin._passed, twin._events = dict(self._passed), list(self._events)
        twin._unsent, twin._again = deque(self._unsent), deque(self._again)
        twin._samples = deque(self._samples)
        return twin

    def _run(self, until_s: float) -> None:
        """Let time pass; without an end until all has been sent that will arrive."""
        while self._losses or math.isfinite(until_s):
            ready = (self._again or self._unsent) and len(self._flight) < self._window
            leaves_s = max(self._now_s, self._next_s) if ready else math.inf
            event_s = self._events[0].at_s if self._events else math.inf
            if min(leaves_s, event_s) > until_s:
                self._now_s = until_s
                return
            if event_s <= leaves_s:
                event = heapq.heappop(self._events)
                self._now_s = max(self._now_s, event.at_s)
                sent = self._flight.get(event.packet)
                if sent is not None and sent.left_s == event.left_s:
                    self._happen(event, sent)
            else:
                self._now_s = leaves_s
                self._leave()

    def _later(self, at_s: float, what: str, packet: int, left_s: float) -> None:
        self._made += 1
        heapq.heappush(self._events, _Event(at_s, self._made, what, packet, left_s))

    def _leave(self) -> None:
        packet = self._again.popleft() if self._again else self._unsent.popleft()
        now_s = self._now_s
        if not self._flight:
            self._first_left_s = self._delivered_s = now_s
            if self._application_until:  # after a pause: neither faster nor slower
                self._pace = self._bandwidth() if self._mode == "probe" else self._pace
        self._flight[packet] = _Sent(
            now_s,
            self._delivered,
            self._delivered_s,
            self._first_left_s,
            self._application_until > 0,
        )
        self._passed[packet] = 0
        self._next_s = max(self._next_s, now_s) + 1 / self._pace
        self._link_free_s = max(self._link_free_s, now_s) + 1 / self._rate
        if self._losses[packet] == 0:
            del self._losses[packet]
            self._whole_s = max(self._whole_s, self._link_free_s + self._trip_s / 2)
            self._later(self._link_free_s + self._trip_s, "acknowledged", packet, now_s)
        else:
            self._losses[packet] -= 1
        if not self._again and not self._unsent:
            alone_s = _LEAST_RETRY_S if len(self._flight) == 1 else 0.0
            after_s = min(2 * self._trip_s + alone_s, self._trip_s + _LEAST_RETRY_S)
            self._later(now_s + after_s, "asked", packet, now_s)

    def _happen(self, event: _Event, sent: _Sent) -> None:
        if event.what == "acknowledged":
            self._acknowledged(event.packet, sent)
        elif event.packet not in self._losses:
            return  # it waits in the link's queue: senders' time-outs have that in them
        elif event.what == "late" or next(reversed(self._flight)) == event.packet:
            self._lose(event.packet)

    def _acknowledged(self, packet: int, sent: _Sent) -> None:
        now_s = self._now_s
        del self._flight[packet], self._passed[packet]
        self._delivered += 1
        if self._application_until and self._delivered > self._application_until:
            self._application_until = 0
        interval_s = max(now_s - sent.delivered_s, sent.left_s - sent.first_left_s)
        rate = (self._delivered - sent.delivered) / interval_s
        self._delivered_s, self._first_left_s = now_s, sent.left_s
        for other, each in list(self._flight.items()):
            if each.left_s >= sent.left_s:
                break
            self._passed[other] += 1
            if self._passed[other] >= _PASSED:
                self._lose(other)
            elif self._passed[other] == 1:
                self._later(now_s + self._trip_s / 4, "late", other, each.left_s)
        began = sent.delivered >= self._round_ends
        if began:
            self._round_ends = self._delivered
            self._round += 1
            self._conserving = False
        if not sent.of_application or rate >= self._bandwidth():
            self._sample(rate)
        if began and not sent.of_application:
            self._look_whether_full()
        self._recover()
        self._steer()

    def _lose(self, packet: int) -> None:
        del self._flight[packet], self._passed[packet]
        self._again.append(packet)
        if self._recovers_at is None:
            self._recovers_at = self._delivered + len(self._flight) + len(self._again)
            self._window_before = self._window
            self._window = len(self._flight) + 1.0
            self._conserving = True
            self._round_ends = self._delivered

    def _recover(self) -> None:
        if self._recovers_at is not None and self._delivered >= self._recovers_at:
            self._recovers_at = None
            self._conserving = False
            self._window = max(self._window, self._window_before)

    def _sample(self, rate: float) -> None:
        while self._samples and self._samples[-1][1] <= rate:
            self._samples.pop()
        self._samples.append((self._round, rate))
        while self._samples[0][0] <= self._round - _FILTER_ROUNDS:
            self._samples.popleft()

    def _bandwidth(self) -> float:
        return self._samples[0][1] if self._samples else 0.0

    def _look_whether_full(self) -> None:
        if self._full_rounds >= _FULL_ROUNDS:
            return
        if self._bandwidth() >= _FULL_GROWTH * self._full:
            self._full, self._full_rounds = self._bandwidth(), 0
        else:
            self._full_rounds += 1

    def _steer(self) -> None:
        """Set pace and window by what is known now."""
        if self._now_s > self._looks_s:
            self._looks_until_s = self._now_s + _LOOK_S + self._trip_s
            self._looks_s = self._looks_until_s + _LOOK_EVERY_S
            self._window_before = max(self._window, self._window_before)
        bandwidth = self._bandwidth()
        holds = bandwidth * self._trip_s
        full = self._full_rounds >= _FULL_ROUNDS
        if self._mode == "startup" and full:
            self._mode = "drain"
        if self._mode == "drain" and len(self._flight) <= holds:
            self._mode, self._phase, self._phase_s = "probe", 2, self._now_s
        gain = {"startup": _STARTUP_GAIN, "drain": 1 / _STARTUP_GAIN}.get(self._mode)
        if gain is None:
            gain = self._cycle(holds)
        pace = _MARGIN * gain * bandwidth
        if full or pace > self._pace:
            self._pace = pace
        window_gain = _WINDOW_GAIN if self._mode == "probe" else _STARTUP_GAIN
        target = max(_LEAST_SEGMENTS, math.ceil(window_gain * holds) + _SPARE_SEGMENTS)
        if self._conserving:
            self._window = max(self._window, len(self._flight) + 1.0)
        elif full:
            self._window = min(self._window + 1, target)
        elif self._window < target or self._delivered < _FIRST_SEGMENTS:
            self._window += 1
        self._window = max(self._window, _LEAST_SEGMENTS)
        if self._now_s < self._looks_until_s:
            self._window = _LEAST_SEGMENTS
        elif self._looks_until_s:
            self._looks_until_s, self._window = 0.0, max(self._window, self._window_before)

    def _cycle(self, holds: float) -> float:
        """Return the gain of the phase that the connection is in, or enters now."""
        gain, flight = _CYCLE[self._phase], len(self._flight)
        over = self._now_s - self._phase_s > self._trip_s
        if gain > 1:
            over = over and (self._recovers_at is not None or flight >= gain * holds)
        elif gain < 1:
            over = over or flight <= holds
        if over:
            self._phase, self._phase_s = (self._phase + 1) % len(_CYCLE), self._now_s
        return _CYCLE[self._phase]
