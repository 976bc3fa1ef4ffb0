"""How long peers and rounds are waited for, from what was measured.

| wait | deadline |
|---|---|
| a stream, or a short answer | mean and 4 deviations of its answers, 2 packets lost, lateness |
| an answer to being dialled | the same of all peers' answers |
| a stream on which nothing moves | till its next sign of life is due, 3 packets lost, lateness |
| a part of a round, at least: the *floor* | the slowest member's stream and answer |
| a member's answer to an invitation | 2 of the slowest member's steps, and a fetch |
| fetching an anchor | as an exchange of its size, or twice what the slowest behind has needed |
| exchange of all slices | 4 times what the slowest of recent rounds would take, and the floor |
| slices of contributors, at their owner | half of the exchange |
| the leader's decision | the exchange and the floor |

The first four are those of `Waits`. Mean and deviation are those of RFC 6298, which sets TCP's own
deadlines so; after a deadline has passed the next one is twice as long, three times at most. Of a
stranger the answers of all peers are taken. Lateness is twice the longest time for which this
machine lately did not run the event loop.

The others are those of `RoundTiming`. Claims of being slow count up to 8 times the usual step, and
20 times the usual fetch.

What is passed in are initial values: they hold until something was measured.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MOST_S = 120.0
"""No wait is longer: a hang becomes an error. RFC 6298 allows no such bound below a minute."""
_MEAN_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4.0
"""RFC 6298, 2.3."""
_FIRST_RTO_S = 1.0
"""When TCP sends the first packet of a connection again (RFC 6298, 2.1): no setting changes it."""
_LEAST_RTO_S = 0.2
"""Linux sends no other packet again before that (`TCP_RTO_MIN`)."""
_TWICE_LOST, _THRICE_LOST = 1 + 2, 1 + 2 + 4
"""Retransmission timeouts until a packet gets through that is lost so often: each one doubles."""
_DOUBLINGS = 3
_SLOWER = 8.0
"""A member that answers, or by its own claim makes steps, so many times slower than is usual is
not waited for any longer."""
_LATE_AGAIN = 2.0
_PEERS_MAX = 4096
_LOOK_S = 0.25
_WINDOW_S, _WINDOWS = 60.0, 10
"""What counts as lately: so many windows."""
_STEPS = 2.0
_EXCHANGES = 4.0
_REMEMBERED = 8
_OUTLIERS = 1
_FETCHES = 2.0
_SLOWER_FETCH = 20.0
_TELLING_BYTES = 1 << 10


class LoopStalls:
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


class Estimate:
    """Smoothed mean and mean deviation of times, as RFC 6298 keeps them of round trips."""

    def __init__(self) -> None:
        """Know of none."""
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def observe(self, seconds: float) -> None:
        """Learn from one more."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        off_s = abs(self._mean_s - seconds)
        self._deviation_s += _DEVIATION_GAIN * (off_s - self._deviation_s)
        self._mean_s += _MEAN_GAIN * (seconds - self._mean_s)

    @property
    def most_s(self) -> float | None:
        """Return what the next one is hardly above; None if none was seen."""
        return None if self._mean_s is None else self._mean_s + _DEVIATIONS * self._deviation_s


@dataclass
class _Peer:
    answers: Estimate = field(default_factory=Estimate)
    beats: Estimate = field(default_factory=Estimate)
    beat_at_s: float | None = None
    missed: int = 0


_STRANGER = _Peer()
"""Of whom nothing was measured; never changed."""


class Waits:
    """One peer's deadlines for all others; on its event loop."""

    def __init__(
        self, *, answer_s: float, stall_s: float, floor_s: float, beat_s: float, life_s: float
    ) -> None:
        """Start without measurements, with these initial values.

        A peer has told when it beats: every `beat_s` at least; its record lives for `life_s`.
        """
        self._answer_s, self._stall_s, self._floor_s = answer_s, stall_s, floor_s
        self._beat_s, self._life_s = beat_s, life_s
        self.stalls = LoopStalls(life_s)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._all = Estimate()

    def observe_answer(self, peer_id: str, seconds: float) -> None:
        """Learn how long a peer took to open a stream, or to answer over one."""
        peer = self._peer(peer_id)
        peer.answers.observe(seconds)
        peer.missed = 0
        self._all.observe(seconds)

    def missed(self, peer_id: str) -> None:
        """Learn that a peer did not answer in time: be more patient next time."""
        peer = self._peer(peer_id)
        peer.missed = min(peer.missed + 1, _DOUBLINGS)

    def observe_beat(self, peer_id: str, at_s: float) -> None:
        """Learn when a peer, by its own record, gave its last sign of life."""
        peer = self._peer(peer_id)
        if peer.beat_at_s is not None and at_s > peer.beat_at_s:
            peer.beats.observe(min(at_s - peer.beat_at_s, self._life_s))
        peer.beat_at_s = at_s

    @property
    def late_s(self) -> float:
        """Return how much later than due this machine may do anything."""
        return _LATE_AGAIN * self.stalls.longest_s

    def answer_s(self, peer_id: str) -> float:
        """Return how long a peer may take to open a stream, or to give a short answer."""
        peer = self._peers.get(peer_id, _STRANGER)
        usual_s = self._usual_s(peer)
        if usual_s is None:
            within_s = self._answer_s
        else:
            within_s = usual_s + _TWICE_LOST * max(usual_s, _FIRST_RTO_S)
        return min(within_s * (1 << peer.missed) + self.late_s, MOST_S)

    def dial_s(self) -> float:
        """Return how long whoever asks to be dialled may take to answer that.

        Never longer than the initial value: peers that answer slowly, on purpose perhaps, must not
        have all others wait for strangers.
        """
        usual_s, within_s = self._all.most_s, self._answer_s
        if usual_s is not None:
            within_s = min(within_s, usual_s + _TWICE_LOST * max(usual_s, _FIRST_RTO_S))
        return min(within_s + self.late_s, MOST_S)

    def stall_s(self, peer_id: str) -> float:
        """Return for how long nothing may move on a stream with a peer that lives."""
        peer = self._peers.get(peer_id, _STRANGER)
        usual_s, beat_s = self._usual_s(peer), peer.beats.most_s
        if usual_s is None or beat_s is None:
            return min(self._stall_s + self.late_s, MOST_S)
        lost_s = _THRICE_LOST * max(usual_s, _LEAST_RTO_S)
        return min(max(beat_s, self._beat_s) + lost_s + self.late_s, MOST_S)

    def floor_s(self, members: Iterable[str]) -> float:
        """Return the least that a part of a round with these members may take."""
        each_s = sorted(self.answer_s(peer_id) for peer_id in members)
        if not each_s or self._all.most_s is None:
            return min(self._floor_s + self.late_s, MOST_S)
        usual_s = statistics.median_low(each_s)
        return min(2 * min(each_s[-1], _SLOWER * usual_s), MOST_S)  # a stream, and an answer

    def _usual_s(self, peer: _Peer) -> float | None:
        own_s = peer.answers.most_s
        return self._all.most_s if own_s is None else own_s

    def _peer(self, peer_id: str) -> _Peer:
        peer = self._peers.setdefault(peer_id, _Peer())
        self._peers.move_to_end(peer_id)
        if len(self._peers) > _PEERS_MAX:
            self._peers.popitem(last=False)
        return peer


class RoundTiming:
    """Turns measurements into deadlines between a floor and a ceiling."""

    def __init__(
        self, *, floor_s: Callable[[], float], ceiling_s: float, slowest_bytes_per_s: float
    ) -> None:
        """Start without measurements; `floor_s` returns the floor as it is now, see `Waits`."""
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._assumed_s_per_byte = 1 / slowest_bytes_per_s
        self._s_per_byte: deque[float] = deque(maxlen=_REMEMBERED)
        self._rounds_s: deque[float] = deque(maxlen=_REMEMBERED)
        self.fetch_bytes_per_s = 0.0
        """Rate of the last fetch of an anchor; 0 before one was measured."""
        self.moved_bytes = 0
        """Bytes that exchanges have moved each way, ever."""
        self.fetched_bytes = 0
        """Bytes that came of anchors from donors, ever."""

    @property
    def floor_s(self) -> float:
        """No part of a round is given less time."""
        return min(self._floor_s(), self._ceiling_s)

    def answer_s(self, step_s: Iterable[float]) -> float:
        """Return how long members with these step times may take to hand over a snapshot."""
        steps = sorted(step_s)
        if not steps:
            return self._bounded(self.floor_s)
        slowest_s = min(steps[-1], _SLOWER * steps[len(steps) // 2])
        return self._bounded(self.floor_s + _STEPS * slowest_s)

    def fetch_s(self, anchor_bytes: int, rates_bytes_per_s: Iterable[float]) -> float:
        """Return how long members may take to fetch an anchor; 0 is a rate not measured yet.

        Who once was too slow is given twice the time that its link has shown to need: so nobody
        is left behind for good.
        """
        slowest = min((rate for rate in rates_bytes_per_s if rate > 0), default=0.0)
        usual_s = self.exchange_s(anchor_bytes)
        needed_s = _FETCHES * anchor_bytes / slowest if slowest else 0.0
        return self._bounded(max(usual_s, min(needed_s, _SLOWER_FETCH * usual_s)))

    def exchange_s(self, wire_bytes: int) -> float:
        """Return how long a member may take to move `wire_bytes` each way."""
        s_per_byte = max(self._s_per_byte, default=self._assumed_s_per_byte)
        return self._bounded(self.floor_s + _EXCHANGES * s_per_byte * wire_bytes)

    def observe(self, wire_bytes: int, seconds: float) -> None:
        """Learn from an exchange that came to its end."""
        self.moved_bytes += wire_bytes
        if wire_bytes > 0:
            self._s_per_byte.append(seconds / wire_bytes)

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate of the fastest of recent exchanges; 0 before one was measured."""
        fastest = min((s for s in self._s_per_byte if s > 0), default=0.0)
        return 1 / fastest if fastest else 0.0

    def observe_fetch(self, received_bytes: int, seconds: float) -> None:
        """Learn from a fetch, complete or cut off, how fast anchors come here."""
        self.fetched_bytes += received_bytes
        if received_bytes >= _TELLING_BYTES and seconds > 0:
            self.fetch_bytes_per_s = received_bytes / seconds

    def failed(self) -> None:
        """Learn that an exchange ran into its deadline: be more patient next time."""
        self._s_per_byte.append(2 * max(self._s_per_byte, default=self._assumed_s_per_byte))

    def observe_round(self, seconds: float) -> None:
        """Learn how long a round took from invitation to decision."""
        self._rounds_s.append(seconds)

    @property
    def round_s(self) -> float:
        """Return the second longest of the last eight rounds; 0 before two were measured."""
        longest = sorted(self._rounds_s, reverse=True)
        return longest[_OUTLIERS] if len(longest) > _OUTLIERS else 0.0

    def _bounded(self, value_s: float) -> float:
        return min(value_s, self._ceiling_s)
