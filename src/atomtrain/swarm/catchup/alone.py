"""A peer without others: its anchors follow its parameters, and whoever comes next starts there."""

from __future__ import annotations

import asyncio

from atomtrain.swarm.anchors.anchors import Anchor, Merge, Snapshot, digest_of, whole
from atomtrain.swarm.anchors.buffer_pool import large_copy, large_empty
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.anchors.updates import Place, rows_of
from atomtrain.swarm.catchup.repair import Repairer
from atomtrain.swarm.codecs.codec import all_finite
from atomtrain.swarm.rounds.context import Context


async def go_alone(context: Context, repairer: Repairer, round_index: int) -> None:
    """Let the anchor follow the parameters in a round that nobody else is in."""
    fragment = context.agenda.fragment(round_index)
    if fragment in repairer.busy or context.agenda.refusal(round_index):
        return
    context.agenda.begin(round_index, f"{round_index}-alone")
    repairer.busy.add(fragment)
    started_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(context.config.round_ceiling_s):
            snapshot = await context.snapshot(fragment)
        if not await context.offload(all_finite, snapshot.values):
            context.desk.report(_kept(snapshot, round_index))
            return
        merge = await context.offload(_follow_local, context, snapshot)
        report = RoundReport(
            round=round_index,
            fragment=fragment,
            version=merge.anchor.stamp.version,
            outcome="averaged",
            contributors=(context.peer_id,),
            weights=(snapshot.weight,),
            duration_s=asyncio.get_running_loop().time() - started_s,
            reason="alone",
        )
        context.desk.leave_merge(merge, report)
    finally:
        context.agenda.end(round_index)
        repairer.free(fragment)


def _kept(snapshot: Snapshot, round_index: int) -> RoundReport:
    """Return the report of a round that leaves the anchor as it is: others would not take it."""
    return RoundReport(
        round=round_index,
        fragment=snapshot.fragment,
        version=snapshot.anchor.stamp.version,
        outcome="abandoned",
        reason="this peer's parameters are not finite",
    )


def _follow_local(context: Context, snapshot: Snapshot) -> Merge:
    old = snapshot.anchor.stamp
    if snapshot.gradient:
        return _step_alone(context, snapshot)
    new = old.next(snapshot.weight)
    anchor = context.desk.store.fresh(snapshot.values, version=new.version, tokens=new.tokens)
    spans = whole(snapshot.values.numel())
    return Merge(snapshot.fragment, anchor, (), snapshot, spans)


def _step_alone(context: Context, snapshot: Snapshot) -> Merge:
    old, update = snapshot.anchor, context.updates[0]
    values = large_empty(old.values.numel())
    velocity = None if old.velocity is None else large_copy(old.velocity)
    everything = whole(values.numel())
    update.apply(
        old.values,
        snapshot.contribution(everything[0]),
        rows_of(velocity, update.rows, everything[0]),
        out=values,
        place=Place(snapshot.fragment, 0, old.stamp.version),
    )
    stamp = old.stamp.next(snapshot.weight, digest_of(values, velocity))
    return Merge(snapshot.fragment, Anchor(values, velocity, stamp), (), snapshot, everything)
