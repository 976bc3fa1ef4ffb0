"""The end of a run: rounds without steps between them, until nothing that was learnt is left out.

And a peer's own end, at whatever moment: the round that it is in, and no other.

While peers train, each is ahead of the anchors by what it has learnt since its last rounds, noise
of its own small batches included. Averaging that too makes a better model than any of them has,
and the same one for all that end together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atomtrain.swarm.anchors.anchor_store import FragmentAccess
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.membership.records import TRAINING
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.leader_io import exchange_bytes

_BETWEEN_S = 0.002
_LOOK_S = 0.05
"""A round may end here without anything to merge."""
_ROUNDS = 2


def settle(context: Context, access: FragmentAccess, stop: Callable[[], bool]) -> list[RoundReport]:
    """Cross boundaries without steps; see `Swarm.settle`. For the training thread."""
    reports: list[RoundReport] = []
    left = len(unsettled(context))
    until_s = time.monotonic() + patience_s(context)
    while left and _others(context) and not stop() and time.monotonic() < until_s:
        reports += _cross(context, access)
        if len(unsettled(context)) < left:
            left = len(unsettled(context))
            until_s = time.monotonic() + patience_s(context)
        time.sleep(_BETWEEN_S)
    return reports


def finish(
    context: Context, access: FragmentAccess, in_rounds: Callable[[], bool], within_s: float
) -> list[RoundReport]:
    """Cross boundaries without steps until no round needs them; see `Swarm.finish`."""
    reports: list[RoundReport] = []
    until_s = time.monotonic() + within_s
    while True:
        last = not in_rounds() or time.monotonic() >= until_s
        reports += _cross(context, access)  # the last one merges what a round has left
        if last:
            return reports
        context.mailbox.wait(_LOOK_S)


def _cross(context: Context, access: FragmentAccess) -> list[RoundReport]:
    """Cross a boundary after a step that was none."""
    speed = context.mailbox.progress
    return context.mailbox.boundary(
        steps=0, tokens=0, tokens_per_s=speed.tokens_per_s, step_s=speed.step_s, access=access
    )


def unsettled(context: Context) -> list[int]:
    """Return the fragments whose anchors do not contain all that this peer has to give."""
    store = context.mailbox.store
    return [f for f in range(len(store.fragment_elements)) if store.unmerged_tokens(f) > 0]


def patience_s(context: Context) -> float:
    """Return how long nothing may come of it: so long may two rounds take."""
    members = context.roster.training()
    elements = context.manifest.fragment_elements
    largest = max(range(len(elements)), key=elements.__getitem__)
    timing = context.timing
    moved_bytes = exchange_bytes(context, largest, max(2, len(members)), bases=True)
    answer_s = timing.answer_s(record.step_s for record in members)
    return _ROUNDS * (answer_s + timing.exchange_s(moved_bytes) + timing.floor_s)


def _others(context: Context) -> bool:
    """Say whether another peer takes part that answers."""
    return any(record.state == TRAINING for record in context.roster.others)
