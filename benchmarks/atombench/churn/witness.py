"""A witness of the means: `atom` as ever, but every round's contribution and result are noted.

    python -m atombench.churn.witness FILE train ...

No peer of a swarm sees the contributions of all others in full. So each peer notes, at evenly
spread elements of the fragment, what it contributed to a round and what the round made of the
anchor; whoever has the notes of all contributors can do the sum again, on other ground: from the
parameters themselves, not from what travelled.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atomtrain.swarm.anchors.anchors import Merge
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport, TrainerMailbox

_ELEMENTS = 256
# Contributions and mean travel as float16: each is off by 2^-11 of itself, and numbers next to 0
# by 2^-25. The anchor rounds to float32: 2^-24 of parameters of size 1 or so.
_RELATIVE = 2.0**-9
_ABSOLUTE = 2.0**-20

Note = dict[str, Any]


def note_of(merge: Merge, report: RoundReport) -> Note | None:
    """Return what is noted of a merge; `None` unless it comes from a round of several peers."""
    snapshot, anchor = merge.snapshot, merge.anchor
    if snapshot is None or not anchor.origin.parts or not report.contributors:
        return None
    old = snapshot.anchor.values
    where = positions(old.numel())
    return {
        "round_id": anchor.origin.round_id,
        "elements": old.numel(),
        "parts": [[*part.span, sorted(part.contributors)] for part in anchor.origin.parts],
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
    """Parts of rounds, as applied by one peer, that are the mean of what was contributed."""
    wrong: int
    unknown: int
    """A contributor left no note: it was killed before the round's end."""


def check_means(notes: Iterable[tuple[str, Note]]) -> Means:
    """Do all sums again; `notes` come with the id of the peer that wrote them."""
    rounds: dict[str, dict[str, Note]] = defaultdict(dict)
    for peer_id, note in notes:
        rounds[note["round_id"]][peer_id] = note
    verdicts = [verdict for members in rounds.values() for verdict in _verdicts(members)]
    return Means(verdicts.count(True), verdicts.count(False), verdicts.count(None))


def _verdicts(members: dict[str, Note]) -> Iterator[bool | None]:
    for note in members.values():
        where = positions(note["elements"])
        applied = torch.tensor(note["applied"], dtype=torch.float64)
        for start, stop, contributors in note["parts"]:
            if not set(contributors) <= members.keys():
                yield None
                continue
            inside = (where >= start) & (where < stop)
            shares = torch.tensor([float(note["weights"][c]) for c in contributors])
            given = _contributed(members, contributors)[:, inside]
            mean = (given * (shares / shares.sum()).double()[:, None]).sum(0)
            allowed = _RELATIVE * given.abs().amax(0) + _ABSOLUTE
            yield bool(((applied[inside] - mean).abs() <= allowed).all())


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
    leave_merge = TrainerMailbox.leave_merge

    def noted(mailbox: TrainerMailbox, merge: Merge, report: RoundReport) -> None:
        note = note_of(merge, report)
        if note is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
        leave_merge(mailbox, merge, report)

    TrainerMailbox.leave_merge = noted  # type: ignore[method-assign, assignment]


def main(arguments: Sequence[str]) -> int:
    """Run `atom` with a witness."""
    from atomtrain.cli.main import main as atom

    record(Path(arguments[0]))
    return atom(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
