"""Which peers average with each other in a round, and when their anchors are near enough for that.

Pure functions of what every peer reads in the membership records. Peers whose records differ for a
moment get different answers, and nothing depends on their being the same: see docs/groups.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.membership.agenda import lead_order

SLACK_VERSIONS = 2
"""Siblings: anchors that are at most so many versions apart average with each other."""


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


def supersedes(other: Stamp, own: Stamp, slack: int) -> bool:
    """Say whether a peer that has the anchor `own` has to fetch `other`.

    With `slack` 0 whenever `other` is better; else siblings, so many versions apart at most, do
    not replace each other.
    """
    return other.beats(own) and (slack == 0 or not siblings(other, own, slack))


def siblings(one: Stamp, other: Stamp, slack: int) -> bool:
    """Say whether two anchors of a fragment may meet in a round."""
    return one == other or (slack > 0 and abs(one.version - other.version) <= slack)
