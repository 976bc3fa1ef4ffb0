"""How long a peer is waited for, from what was measured of it and of this machine.

| wait | deadline |
|---|---|
| a stream, or a short answer | mean and 4 deviations of its answers, 2 packets lost, lateness |
| an answer to being dialled | the same of all peers' answers |
| a stream on which nothing moves | till its next sign of life is due, 3 packets lost, lateness |
| a part of a round, at least | the slowest member's stream and answer |

Mean and deviation are those of RFC 6298, which sets TCP's own deadlines so; after a deadline has
passed the next one is twice as long, three times at most. Of a stranger the answers of all peers
are taken. Lateness is twice the longest time for which this machine lately did not run the event
loop. What is passed in are initial values: they hold until something was measured.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atomtrain.swarm.transport.stall_detector import Stillness

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
"""A member that answers so many times slower than is usual is not waited for any longer."""
_LATE_AGAIN = 2.0
_PEERS_MAX = 4096

Patience = Callable[[str], float]
"""Returns how long a peer is waited for."""


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
        self.stillness = Stillness(life_s)
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
        return _LATE_AGAIN * self.stillness.longest_s

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
