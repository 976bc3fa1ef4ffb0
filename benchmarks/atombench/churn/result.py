"""What a run of the churn benchmark tells: what was seen so far, and what is checked at its end."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from atombench.churn.check import (
    HANG_S,
    averaging_times,
    compare_checkpoints,
    disagreements,
    first_and_last_loss,
    rejoin_times,
    stops,
)
from atombench.churn.peers import ChurnPeer
from atombench.churn.witness import check_means, read_notes
from atombench.common import Result, progress


def seen(
    peers: Sequence[ChurnPeer], newcomers: Sequence[ChurnPeer], late: Sequence[ChurnPeer]
) -> Result:
    """Return what the events of all peers tell at any time; cheap.

    Args:
        peers: All there ever were; at least one has made a step.
        newcomers: Those that took the place of killed ones.
        late: Those that had not averaged with others by their deadline.
    """
    stood = stops(peers)
    times_s, averaging_s = rejoin_times(newcomers), averaging_times(newcomers)
    first, last = first_and_last_loss(peers)
    rounds = Counter(e["outcome"] for p in peers for e in p.of("round"))
    together = [e for p in peers for e in p.of("round") if e["contributors"] > 1]
    return {
        "kills": sum(peer.killed for peer in peers),
        "kills_while_joining": sum(p.killed and not p.of("step") for p in peers),
        "kills_before_averaging": sum(p.killed and p.first_average_s is None for p in peers),
        "founder_killed": peers[0].killed,
        "hangs": stood.hangs + len(late),
        "hang_s": HANG_S,
        "longest_stop_s": stood.longest_s,
        "longest_stop_peer": stood.peer,
        "longest_stop_from_s": stood.from_s - peers[0].started_s,
        "rejoin_s": statistics.median(times_s) if times_s else None,
        "rejoins": len(times_s),
        "averages_s": statistics.median(averaging_s) if averaging_s else None,
        "rejoins_that_averaged": len(averaging_s),
        "loss_first": first,
        "loss_last": last,
        "steps": sum(len(peer.of("step")) for peer in peers),
        "rounds": dict(rounds),
        "rounds_of_several": len(together),
        "longest_round_s": max((e["duration_s"] for e in together), default=None),
    }


def checked(peers: Sequence[ChurnPeer], left: Sequence[ChurnPeer]) -> Result:
    """Return whether anything was wrong, once those in `left`, asked to, have left the run.

    Who still runs did not save and leave in time: it hangs.
    """
    hung = [p for p in peers if not p.killed and p not in left and p.running]
    for peer in hung:
        progress(f"{peer.name} has not saved and left: {peer.last_words()}")
    failed = [p for p in peers if not p.killed and p not in left and p not in hung]
    for peer in failed:
        progress(f"{peer.name} ended by itself: {peer.last_words()}")
    differing = disagreements(peers)
    for item in differing:
        progress(f"disagreement: {item}")
    outcomes = Counter(item.outcome for item in differing)
    anchors = compare_checkpoints(p.folder / "checkpoints" for p in left if p.of("run_finished"))
    means = check_means((p.peer_id, n) for p in peers for n in read_notes(p.notes))
    return {
        "wrong_means": means.wrong + outcomes["lasting"] + anchors.unequal,
        "means": means._asdict(),
        "disagreements": {
            "repaired": outcomes["repaired"],
            "cut_short": outcomes["cut short"],
            "lasting": outcomes["lasting"],
        },
        "last_anchors_compared": anchors.compared,
        "last_anchors_unequal": anchors.unequal,
        "ended_by_themselves": len(failed),
        "hung_at_the_end": len(hung),
    }
