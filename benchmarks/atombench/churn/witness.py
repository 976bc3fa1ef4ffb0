"""A witness of the means: `atom` as ever, but every round's contribution and result are noted.

    python -m atombench.churn.witness FILE train ...

No peer of a swarm sees the contributions of all others in full. So each peer notes, at evenly
spread elements of the fragment, what it contributed to a round and what the round made of the
anchor; whoever has the notes of all contributors can do the sum again, on other ground: from the
parameters themselves, not from what travelled.

Where a mean is clipped, its owner says what each contribution counts. Receivers note that, too: the
sum is done with it, and it has to be what such an owner may say at all.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atomtrain.swarm.anchors.anchors import Merge
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport, TrainerMailbox
from atomtrain.swarm.anchors.updates import Update
from atomtrain.swarm.codecs.slices import slice_spans
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.rounds import round_member
from atomtrain.swarm.rounds.round_member import Decided

_ELEMENTS = 256
# Contributions and mean travel as float16: each is off by 2^-11 of itself, and numbers next to 0
# by 2^-25. The anchor rounds to float32: 2^-24 of parameters of size 1 or so.
_RELATIVE = 2.0**-9
_ABSOLUTE = 2.0**-20

Note = dict[str, Any]


class Slice(NamedTuple):
    """A slice that a round has changed."""

    start: int
    stop: int
    contributors: tuple[str, ...]
    shares: tuple[float, ...] | None
    """What each counts, as the owner has said to this peer; empty: as its weight says. None: this
    peer owned the slice, and others have been told."""


def slices_of(decided: Decided) -> list[Slice]:
    """Return the slices that a round changes at this peer."""
    members, means = decided.begin.members, decided.result.means
    spans = slice_spans(decided.result.values.numel(), len(means))
    return [
        Slice(*spans[j], tuple(members[i] for i in mean.contributors),
              None if mean.header is None else mean.header.shares)
        for j in decided.commit.slices if (mean := means[j]) is not None
    ]  # fmt: skip


def note_of(merge: Merge, report: RoundReport, slices: Sequence[Slice]) -> Note | None:
    """Return what is noted of a merge; `None` unless it comes from a round of several peers."""
    snapshot, anchor = merge.snapshot, merge.anchor
    if snapshot is None or not slices or not report.contributors:
        return None
    old = snapshot.anchor.values
    where = positions(old.numel())
    return {
        "round_id": anchor.origin.round_id,
        "elements": old.numel(),
        "slices": slices,
        "weights": dict(zip(report.contributors, report.weights, strict=True)),
        "contributed": (snapshot.values[where] - old[where]).tolist(),
        "applied": (anchor.values[where] - old[where]).tolist(),
    }


def positions(elements: int) -> torch.Tensor:
    """Return the indices of the noted elements."""
    return torch.linspace(0, elements - 1, min(elements, _ELEMENTS), dtype=torch.float64).long()


class Means(NamedTuple):
    """How often notes agree with the weighted mean."""

    right: int
    """Slices of rounds, as applied by one peer, that are the mean of what was contributed."""
    clipped: int
    """Of those, where contributions do not count as their weights say."""
    wrong: int
    unknown: int
    """A contributor left no note, or nobody but the owner noted what each counts: one was killed
    before the round's end."""


def check_means(notes: Iterable[tuple[str, Note]]) -> Means:
    """Do all sums again; `notes` come with the id of the peer that wrote them."""
    rounds: dict[str, dict[str, Note]] = defaultdict(dict)
    for peer_id, note in notes:
        rounds[note["round_id"]][peer_id] = note
    found = Counter(verdict for members in rounds.values() for verdict in _verdicts(members))
    right = found["plain"] + found["clipped"]
    return Means(right, found["clipped"], found["wrong"], found["unknown"])


def _verdicts(members: dict[str, Note]) -> Iterator[str]:
    told = _shares_told(members.values())
    for note in members.values():
        where = positions(note["elements"])
        applied = torch.tensor(note["applied"], dtype=torch.float64)
        for start, stop, contributors, _ in note["slices"]:
            said = told[start, stop]
            if not set(contributors) <= members.keys() or not said:
                yield "unknown"
                continue
            weights = [note["weights"][c] for c in contributors]
            [shares, *others] = said
            if others or not Guard(mean="clipped").admits(shares, weights):
                yield "wrong"
                continue
            inside = (where >= start) & (where < stop)
            counts = torch.tensor(shares or [weight / sum(weights) for weight in weights])
            given = _contributed(members, contributors)[:, inside]
            mean = (given * counts.double()[:, None]).sum(0)
            allowed = _RELATIVE * given.abs().amax(0) + _ABSOLUTE
            right = bool(((applied[inside] - mean).abs() <= allowed).all())
            yield ("clipped" if shares else "plain") if right else "wrong"


def _shares_told(notes: Iterable[Note]) -> dict[tuple[int, int], set[tuple[float, ...]]]:
    """Return what owners have said that each contribution counts, by slice."""
    told: dict[tuple[int, int], set[tuple[float, ...]]] = defaultdict(set)
    for note in notes:
        for start, stop, _, shares in note["slices"]:
            if shares is not None:
                told[start, stop].add(tuple(shares))
    return told


def _contributed(members: dict[str, Note], contributors: Sequence[str]) -> torch.Tensor:
    rows = [members[peer_id]["contributed"] for peer_id in contributors]
    return torch.tensor(rows, dtype=torch.float64)


def read_notes(path: Path) -> list[Note]:
    """Return the notes in a file; a line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def record(path: Path) -> None:
    """Note every merge of this process in a file from now on."""
    leave_merge, merge_of = TrainerMailbox.leave_merge, round_member.merge_of
    changed: dict[str, list[Slice]] = {}

    def merging(decided: Decided, update: Update, peer_id: str) -> Merge:
        changed[decided.begin.round_id] = slices_of(decided)
        return merge_of(decided, update, peer_id)

    def noted(mailbox: TrainerMailbox, merge: Merge, report: RoundReport) -> None:
        note = note_of(merge, report, changed.pop(merge.anchor.origin.round_id, []))
        if note is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
        leave_merge(mailbox, merge, report)

    round_member.merge_of = merging
    TrainerMailbox.leave_merge = noted  # type: ignore[method-assign, assignment]


def main(arguments: Sequence[str]) -> int:
    """Run `atom` with a witness."""
    from atomtrain.cli.main import main as atom

    record(Path(arguments[0]))
    return atom(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
