"""What a round's decision makes of an anchor: the same bits at all members of its group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atomtrain.swarm.anchors import (
    Anchor,
    Merge,
    Origin,
    Part,
    Snapshot,
    Stamp,
    split_parts,
)
from atomtrain.swarm.bases import velocity_after
from atomtrain.swarm.codec import byte_view
from atomtrain.swarm.context import Context
from atomtrain.swarm.digests import Digest
from atomtrain.swarm.exchange import ExchangeResult
from atomtrain.swarm.groups import SLACK_VERSIONS
from atomtrain.swarm.large import large_copy
from atomtrain.swarm.messages import BadMessage, Begin, Commit
from atomtrain.swarm.outer import OuterUpdate, Place, Update, rows_of
from atomtrain.swarm.slices import Span, slice_spans

_VIEWS_APART = 4
"""So many times more groups than this peer counts are no matter of a moment's difference."""


@dataclass(frozen=True)
class Decided:
    """Everything that the new anchor is computed from."""

    snapshot: Snapshot
    begin: Begin
    commit: Commit
    result: ExchangeResult


def check_begin(begin: Begin, own: Stamp, context: Context) -> None:
    """Check what a leader says of a group against what this member knows.

    Raises:
        BadMessage: it cannot be true.
    """
    if begin.exchange_s > context.config.round_ceiling_s:
        raise BadMessage(f"the leader allows {begin.exchange_s:.0f} s for an exchange")
    if begin.bases and context.manifest.rules.group_size == 0:
        raise BadMessage("the leader has bases in a run without groups")
    if not begin.bases and (begin.version, begin.tokens) != (own.version, own.tokens):
        raise BadMessage("the leader began with another anchor than this member's")
    if begin.tokens < own.tokens or not 0 <= begin.version - own.version <= SLACK_VERSIONS:
        raise BadMessage("the leader's versions are no siblings of this member's")
    if not 1 <= begin.groups <= _VIEWS_APART * (1 + context.roster.groups):
        raise BadMessage(f"the leader speaks of {begin.groups} groups")


def merge_of(decided: Decided, update: Update, peer_id: str) -> Merge:
    """Return the new anchor that a decision makes of the old one, and how to merge it.

    All members compute the same bits: same old anchor, or bases, same decoded means, same
    operations. Where nothing was decided each keeps its own anchor's. The new anchor lies where the
    means did, which are gone then: everybody whose word the decision counts on has them.
    """
    snapshot, begin = decided.snapshot, decided.begin
    old = snapshot.anchor
    values = decided.result.values
    velocity = None if begin.bases else _velocity(old, update)
    parts, digest = [], Digest()
    committed = frozenset(decided.commit.slices)
    for j, span in enumerate(slice_spans(values.numel(), len(decided.result.means))):
        mean = decided.result.means[j]
        start, stop = span
        if j not in committed or mean is None:
            values[start:stop] = old.values[start:stop]
        elif decided.result.bases is not None:
            torch.add(decided.result.bases.values[start:stop], mean.values, out=values[start:stop])
        else:
            update.apply(
                old.values[start:stop],
                mean.values,
                rows_of(velocity, update.rows, span),
                _on_time_share(begin, mean.contributors),
                out=values[start:stop],
                place=Place(snapshot.fragment, start, old.stamp.version),
            )
        digest.update(byte_view(values[start:stop]))  # they are in the processor's cache now
        if j in committed and mean is not None:
            parts.append(Part(span, frozenset(begin.members[i] for i in mean.contributors)))
    if velocity is not None:
        digest.update(byte_view(velocity))
    used = frozenset().union(*(part.contributors for part in parts))
    tokens = sum(w for m, w in zip(begin.members, begin.weights, strict=True) if m in used)
    stamp = Stamp(begin.version + 1, begin.tokens + begin.groups * tokens, digest.text())
    origin = Origin(begin.round_id, tuple(parts))
    anchor = Anchor(values, velocity, stamp, origin, grouped=begin.bases)
    changed, contributed = split_parts(parts, peer_id)
    own_velocity = _own_velocity(snapshot, update, contributed) if begin.bases else None
    return Merge(snapshot.fragment, anchor, changed, snapshot, contributed, velocity=own_velocity)


def _velocity(old: Anchor, update: Update) -> torch.Tensor | None:
    """Return a copy of an anchor's velocity; after several groups it begins with zeros."""
    if old.grouped and update.rows:
        return torch.zeros(update.rows * old.values.numel())
    return None if old.velocity is None else large_copy(old.velocity)


def _own_velocity(
    snapshot: Snapshot, update: Update, contributed: tuple[Span, ...]
) -> torch.Tensor | None:
    assert isinstance(update, OuterUpdate), "gradients are averaged by one group of all"
    return velocity_after(snapshot, update, contributed)


def _on_time_share(begin: Begin, contributors: tuple[int, ...]) -> float:
    total = sum(begin.weights[i] for i in contributors)
    late = sum(begin.weights[i] for i in contributors if begin.late[i])
    return (total - late) / total if total else 1.0
