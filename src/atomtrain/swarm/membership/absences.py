"""Absences: members that are invited and take no part are left out of invitations for a while.

The first absence costs a member nothing: it was just restarted, or busy. From the second in a row
on it is left out for 1 round, then 2, 4, 8 and at most 16. One round in which it takes part, or
which it leads to a decision, clears all of it. A decision names who was absent, so that all members
of a group count alike, whoever leads next. A leader that names others wrongly can do so in its own
rounds and of their groups only, and the next round in which they take part clears it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

_LEFT_OUT_ROUNDS_MAX = 16
_PEERS_MAX = 4096
"""Peers that are remembered: ids cost nothing."""
_LEAST = 2
"""Members of a round: with fewer there is nothing to average."""


class _Absent(NamedTuple):
    times: int
    """Rounds in a row."""
    last_round: int


class Absences:
    """What one peer has seen and heard of who does not come; forgotten when it restarts."""

    def __init__(self) -> None:
        """Know of no absence."""
        self._absent: dict[str, _Absent] = {}

    def observe(self, round_index: int, *, present: Iterable[str], absent: Iterable[str]) -> None:
        """Hear who took part in a round, and who was invited and did not."""
        for peer_id in present:
            self._absent.pop(peer_id, None)
        for peer_id in absent:
            before = self._absent.pop(peer_id, _Absent(0, -1))
            if round_index > before.last_round:
                before = _Absent(before.times + 1, round_index)
            self._absent[peer_id] = before  # who was absent last comes last
        while len(self._absent) > _PEERS_MAX:
            del self._absent[next(iter(self._absent))]

    def left_out(self, peer_id: str, round_index: int) -> bool:
        """Say whether a peer is not to be invited to a round."""
        absent = self._absent.get(peer_id)
        if absent is None or absent.times < 2:
            return False
        rounds = min(1 << min(absent.times - 2, 16), _LEFT_OUT_ROUNDS_MAX)
        return absent.last_round < round_index <= absent.last_round + rounds

    def invited(self, me: str, group: Collection[str], round_index: int) -> set[str]:
        """Return whom of a group a leader invites: all, where else nobody would be left."""
        coming = {p for p in group if p == me or not self.left_out(p, round_index)}
        return coming if len(coming) >= _LEAST else set(group)
