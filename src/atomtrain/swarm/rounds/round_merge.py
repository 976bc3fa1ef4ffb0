"""What a round's decision makes of an anchor: the same bits at all members of its group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atomtrain.swarm.anchors.anchors import Anchor, Merge, Origin, Snapshot, split_parts
from atomtrain.swarm.anchors.stamps import SLACK_VERSIONS, Stamp
from atomtrain.swarm.anchors.updates import OuterUpdate, Update
from atomtrain.swarm.codecs.slices import Span, slice_spans
from atomtrain.swarm.rounds.bases import velocity_after
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.exchange import ExchangeResult
from atomtrain.swarm.rounds.making import Made, Making
from atomtrain.swarm.transport.messages import BadMessage, Begin, Commit

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
    if refusal := context.age.limit.refusal(_stamp_after(begin, sum(begin.weights))):
        raise BadMessage(f"the round would make {refusal}")


def merge_of(decided: Decided, update: Update, peer_id: str) -> Merge:
    """Return the new anchor that a decision makes of the old one, and how to merge it.

    Where nothing was decided each member keeps its own anchor's. The new anchor lies where the
    means did, which are gone then: everybody whose word the decision counts on has them.
    """
    snapshot, begin = decided.snapshot, decided.begin
    made = decided.result.made or _made(decided, update)
    used = frozenset().union(*(part.contributors for part in made.parts))
    tokens = sum(w for m, w in zip(begin.members, begin.weights, strict=True) if m in used)
    stamp = _stamp_after(begin, tokens, made.digest)
    origin = Origin(begin.round_id, made.parts)
    anchor = Anchor(made.values, made.velocity, stamp, origin, grouped=begin.bases)
    changed, contributed = split_parts(made.parts, peer_id)
    own_velocity = _own_velocity(snapshot, update, contributed) if begin.bases else None
    return Merge(snapshot.fragment, anchor, changed, snapshot, contributed, velocity=own_velocity)


def _stamp_after(begin: Begin, tokens: int, digest: str = "") -> Stamp:
    """Return the stamp of what a round makes with so many tokens of its members."""
    return Stamp(begin.version, begin.tokens, "").next(begin.groups * tokens, digest)


def _made(decided: Decided, update: Update) -> Made:
    result, committed = decided.result, frozenset(decided.commit.slices)
    making = Making(decided.snapshot, decided.begin, update, result.values)
    for j, span in enumerate(slice_spans(result.values.numel(), len(result.means))):
        mean = result.means[j]
        if j not in committed or mean is None:
            making.keep(span)
        elif result.bases is not None:
            base = result.bases.values[span.start : span.stop]
            making.rebase(span, mean.values, base, mean.contributors)
        else:
            making.apply(span, mean.values, mean.contributors)
    return making.made()


def _own_velocity(
    snapshot: Snapshot, update: Update, contributed: tuple[Span, ...]
) -> torch.Tensor | None:
    assert isinstance(update, OuterUpdate), "gradients are averaged by one group of all"
    return velocity_after(snapshot, update, contributed)
