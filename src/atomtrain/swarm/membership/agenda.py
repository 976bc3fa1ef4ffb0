"""Which round is next, when it is due, who leads it, and who averages with whom.

Plain bookkeeping: no clock of its own, no streams. Groups and leaders are pure functions of what
every peer reads in the membership records. Peers whose records differ for a moment get different
answers, and nothing depends on their being the same: see docs/groups.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from itertools import pairwise

MEASURED = 0
"""Local steps per round that stand for: as measurements say."""
_BUSY_SHARE = 0.8
_STEPS_MAX = 500
_STEPS_UNMEASURED = 30
_ROUND_MAX = 1 << 48
_LEAP_MAX = 1 << 20
_ROUNDING = 1e-6
GROUP_SIZE = 16
"""Members of a round at most, unless the run's founder says something else."""
GROUP_SIZE_MIN = 3
"""Below, guards have nothing to judge by, and an odd peer out would have nobody."""


def lead_order(run: str, round_index: int, peers: Iterable[str]) -> list[str]:
    """Return the peers in the order in which they lead a round: the first that is alive does.

    Everybody who sees the same members computes the same order, and the work goes round.
    """

    def score(peer_id: str) -> bytes:
        return hashlib.blake2b(f"{run}/{round_index}/{peer_id}".encode(), digest_size=8).digest()

    return sorted(set(peers), key=score)


def group_count(peers: int, group_size: int) -> int:
    """Return into how many groups so many peers are divided; with `group_size` 0 into one."""
    return 1 if group_size == 0 else max(1, -(-peers // group_size))


def groups_of(run: str, round_index: int, peers: Iterable[str], group_size: int) -> list[list[str]]:
    """Return the groups of a round, each in the order in which its members lead.

    As few as the size allows, their sizes differing by one at most. Shuffled in each round: the
    order is that of a hash.
    """
    order = lead_order(run, round_index, peers)
    count = group_count(len(order), group_size)
    starts = [len(order) * i // count for i in range(count + 1)]
    return [order[start:stop] for start, stop in pairwise(starts)]


def group_of(
    run: str, round_index: int, peers: Iterable[str], group_size: int, peer_id: str
) -> list[str]:
    """Return the group that a peer is in; it alone if it is none of `peers`."""
    groups = groups_of(run, round_index, peers, group_size)
    return next((group for group in groups if peer_id in group), [peer_id])


def told_next(group: int, count: int) -> list[int]:
    """Return the groups whose leaders are told by a group's leader that a round is due.

    The edges of a generalised de Bruijn graph (Imase and Itoh 1981): from any group to all others
    in at most ceil(log2(count)) steps.
    """
    return sorted({2 * group % count, (2 * group + 1) % count} - {group})


class Agenda:
    """One peer's view of the sequence of rounds: round r averages fragment r modulo F.

    Round indices only grow; the largest that was heard of counts. A round that failed is not
    repeated: its fragment's turn comes again, and nothing is lost until then.
    """

    def __init__(
        self, *, fragments: int, local_steps_per_round: int, target_tokens: int = 0
    ) -> None:
        """Start at round 0; `local_steps_per_round` may be `MEASURED`, see `pace`.

        With `target_tokens` a round is due when all peers together have had so many; see `share`.
        """
        self._target_tokens = target_tokens
        self.next_round = 0
        self.running_round = -1
        self.late_rounds = 0
        """So many rounds of which others have told the end may still begin here: of several groups,
        some are later than others."""
        self._entered = -1
        self._fragments = fragments
        self._measured = local_steps_per_round == MEASURED
        steps = _STEPS_UNMEASURED if self._measured else local_steps_per_round
        self._steps_per_fragment = max(1, steps // fragments)
        self._steps = 0
        self._running: str | None = None
        self._attempts = 0
        self._not_before_s = 0.0
        self._hasty = False

    def fragment(self, round_index: int) -> int:
        """Return the fragment that a round averages."""
        return round_index % self._fragments

    @property
    def steps_per_fragment(self) -> int:
        """Local steps from one round to the next."""
        return self._steps_per_fragment

    def pace(self, round_s: float, step_s: float) -> None:
        """Take the time of a round, and of the fastest member's steps; 0 is not measured yet.

        Where steps per round are to be measured, they become the fewest with which a round fills at
        most 0.8 of the time until the next one. That decides only when this peer proposes a round,
        so peers whose measurements differ for a while do no harm; the fastest sets the pace.
        """
        if not self._measured or round_s <= 0 or step_s <= 0:
            return
        most = max(1, _STEPS_MAX // self._fragments)
        self._steps_per_fragment = min(max(1, math.ceil(round_s / (_BUSY_SHARE * step_s))), most)

    def share(self, tokens_per_s: float, step_s: float) -> None:
        """Take the speed of all members together, and the time of this peer's steps.

        Where a target is set, the steps from round to round become as many as this peer makes
        while all together have that many tokens. Whoever comes to the end first proposes.
        """
        if self._target_tokens and tokens_per_s > 0 and step_s > 0:
            tokens = tokens_per_s * step_s * (1 + _ROUNDING)
            self._steps_per_fragment = max(1, math.ceil(self._target_tokens / tokens))

    def add_steps(self, steps: int) -> None:
        """Count local steps."""
        self._steps += steps

    def hasten(self) -> None:
        """Have each round proposed as soon as the last one has ended: no steps follow any more."""
        self._hasty = True

    def observe(self, next_round: int) -> None:
        """Hear that others have `next_round` before them.

        A claim far beyond what any swarm reaches is ignored: numbers must not run out.
        """
        if self.next_round < next_round <= max(self.next_round, _ROUND_MAX) + _LEAP_MAX:
            self.next_round = next_round
            self._attempts = 0

    def due(self, now_s: float) -> bool:
        """Say whether this peer should have the next round proposed now."""
        return (
            self._running is None
            and (self._hasty or self._steps >= self._steps_per_fragment)
            and now_s >= self._not_before_s
        )

    def propose_to(self, order: list[str], now_s: float, retry_s: float) -> str:
        """Return whom to tell, and wait `retry_s` until the next in `order` is told."""
        leader = order[self._attempts % len(order)]
        self._attempts += 1
        self._not_before_s = now_s + retry_s
        return leader

    def ask_next(self) -> None:
        """The leader cannot be reached: tell the next one at once."""
        self._not_before_s = 0.0

    def ask_again(self, at_s: float) -> None:
        """Tell the same leader again, not before `at_s`."""
        self._attempts = max(0, self._attempts - 1)
        self._not_before_s = at_s

    def is_over(self, round_index: int) -> bool:
        """Say whether a round has been, for this peer."""
        return round_index <= self._entered or round_index < self.next_round - self.late_rounds

    def refusal(self, round_index: int) -> str:
        """Return why an invitation to a round must be declined, or an empty string."""
        if self._running is not None:
            return f"busy in round {self._running}"
        if self.is_over(round_index):
            return f"round {round_index} is over"
        if round_index > max(self.next_round, _ROUND_MAX) + _LEAP_MAX:
            return f"there will be no round {round_index}"
        return ""

    def begin(self, round_index: int, round_id: str) -> None:
        """Enter a round; any other invitation is declined until `end`."""
        assert not self.refusal(round_index)
        self.observe(round_index)
        self._running = round_id
        self._entered = self.running_round = round_index
        self._steps = 0

    def end(self, round_index: int) -> None:
        """Leave a round, whatever came of it."""
        self._running = None
        self.running_round = -1
        self.observe(round_index + 1)
        self._not_before_s = 0.0

    @property
    def running(self) -> str | None:
        """Id of the round under way at this peer."""
        return self._running
