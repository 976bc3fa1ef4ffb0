"""What events and checkpoints of peers that came and went prove about their swarm.

`seen` is what a run tells at any time, `checked` what is checked at its end.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from atombench.churn.peers import ChurnPeer
from atombench.churn.witness import check_means, read_notes
from atombench.common import Result, progress
from atomtrain.checkpoint import load_latest
from atomtrain.training.setup.state import saved_swarm

HANG_S = 30.0


class Stops(NamedTuple):
    """How long peers stood still."""

    longest_s: float
    hangs: int
    """Stops of at least `HANG_S`."""
    peer: str
    """Who stood still longest."""
    from_s: float
    """Unix time at which the longest stop began."""


def stops(peers: Iterable[ChurnPeer]) -> Stops:
    """Measure the time between steps of each peer, up to its end; evaluations are included."""
    gaps = [(0.0, "", 0.0)]
    for peer in peers:
        times = [step["time_s"] for step in peer.of("step")]
        if times and peer.ended_s is not None:
            times.append(max(peer.ended_s, times[-1]))
        gaps += [(after - before, peer.name, before) for before, after in itertools.pairwise(times)]
    longest_s, name, from_s = max(gaps)
    return Stops(longest_s, sum(gap_s >= HANG_S for gap_s, *_ in gaps), name, from_s)


def rejoin_times(newcomers: Iterable[ChurnPeer]) -> list[float]:
    """Return the seconds from start to first step of those that made one."""
    found = ((peer.started_s, peer.of("step")) for peer in newcomers)
    return [steps[0]["time_s"] - started_s for started_s, steps in found if steps]


def averaging_times(newcomers: Iterable[ChurnPeer]) -> list[float]:
    """Return the seconds from start to the first average with others of those that had one."""
    found = ((peer.started_s, peer.first_average_s) for peer in newcomers)
    return [averaged_s - started_s for started_s, averaged_s in found if averaged_s is not None]


def first_and_last_loss(peers: Iterable[ChurnPeer]) -> tuple[float, float]:
    """Return the mean training loss of the first and last tenth of all steps of all peers."""
    steps = sorted((s["time_s"], s["loss"]) for peer in peers for s in peer.of("step"))
    losses = [loss for _, loss in steps]
    tenth = max(1, len(losses) // 10)
    return statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])


class Held(NamedTuple):
    """An anchor that a peer held from `time_s` on."""

    time_s: float
    version: int
    digest: str


class Disagreement(NamedTuple):
    """Two peers that held different anchors of one version of one fragment."""

    fragment: int
    version: int
    peers: tuple[str, str]
    seen_s: float
    """Unix time at which the second of the two took its anchor."""
    outcome: str
    """`repaired`: later both held one anchor, of this or a higher version. `cut short`: one of the
    two ended within `HANG_S`. `lasting`: neither."""


def disagreements(peers: Sequence[ChurnPeer]) -> list[Disagreement]:
    """Compare the hashes that every pair of peers reported for equal versions."""
    held = {peer.name: _held(peer) for peer in peers}
    # Of several anchors of one version the last counts: it is what repair left.
    last = {
        name: {fragment: {a.version: a for a in anchors} for fragment, anchors in mine.items()}
        for name, mine in held.items()
    }
    ends = {peer.name: peer.ended_s or float("inf") for peer in peers}
    found: list[Disagreement] = []
    for one, other in itertools.combinations(held, 2):
        for fragment in held[one].keys() & held[other].keys():
            for version, seen_s in _differing(last[one][fragment], last[other][fragment]):
                outcome = "lasting"
                if _agree_later(held[one][fragment], held[other][fragment], version, seen_s):
                    outcome = "repaired"
                elif min(ends[one], ends[other]) < seen_s + HANG_S:
                    outcome = "cut short"
                found.append(Disagreement(fragment, version, (one, other), seen_s, outcome))
    return found


def _held(peer: ChurnPeer) -> dict[int, list[Held]]:
    anchors: dict[int, list[Held]] = defaultdict(list)
    for event in peer.of("round"):
        anchors[event["fragment"]].append(Held(event["time_s"], event["version"], event["digest"]))
    return anchors


def _differing(one: dict[int, Held], other: dict[int, Held]) -> Iterator[tuple[int, float]]:
    """Yield version and time of each version of which the two last held different anchors."""
    for version in sorted(one.keys() & other.keys()):
        left, right = one[version], other[version]
        if left.digest != right.digest:
            yield version, max(left.time_s, right.time_s)


def _agree_later(one: list[Held], other: list[Held], version: int, seen_s: float) -> bool:
    later = [
        {h.digest for h in side if h.version >= version and h.time_s >= seen_s}
        for side in (one, other)
    ]
    return bool(later[0] & later[1])


class Comparison(NamedTuple):
    """Anchors of equal versions in the last checkpoints of several peers, compared bit for bit."""

    compared: int
    unequal: int


def compare_checkpoints(folders: Iterable[Path]) -> Comparison:
    """Compare every pair of peers; `folders` hold their checkpoints."""
    anchors: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)
    for folder in folders:
        checkpoint = load_latest(folder)
        saved = saved_swarm(checkpoint)
        assert saved is not None, "its peer has averaged"
        tensors = saved.tensors
        for fragment, version in enumerate(saved.meta["versions"]):
            for kind in ("anchor", "velocity"):
                name = f"{kind}.{fragment}"
                if name in tensors:
                    anchors[name, version].append(tensors[name].view(torch.int32))
    pairs = [
        torch.equal(one, other)
        for same in anchors.values()
        for one, other in itertools.combinations(same, 2)
    ]
    return Comparison(len(pairs), pairs.count(False))


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
