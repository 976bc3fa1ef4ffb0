"""Standing: what this peer thinks of each other one, by evidence alone, and keeps on its disk.

* Two rejected contributions in a row exclude a peer for 8 rounds, then 16 the next time, up to
  1024. A contribution that counts clears its strikes. A peer that comes to this judgement about
  itself starts again from the anchor.
* Who was shown to lie is expelled for good; who gave an anchor that did harm is barred for a while.
* Who comes new to a swarm weighs little in the rounds that this peer leads, and more with each
  round in which what it contributed counted here: identities cost nothing, rounds do.

Nobody is asked, nobody's word is taken. The file is this peer's own, and a liar that comes back
with its old identity finds the judgement as it was.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from atomtrain.files import replacing

_log = logging.getLogger("atomtrain.swarm")
STANDING_FILE = "standing.json"
_STRIKES = 2
_EXCLUDED_ROUNDS = 8
_EXCLUDED_ROUNDS_MAX = 1024
_BARRED_S, _BARRED_S_MAX = 5.0, 86400.0
"""How long nothing is fetched from who gave an anchor that made this peer worse; twice as long each
time. Not for good, and short at first: such a donor may have been deceived itself."""
FULL_ROUNDS = 8
"""Rounds after which a newcomer weighs what it claims."""
_UNSEEN_ROUNDS = 4
"""Rounds in which another peer may judge otherwise than its means say: since it was cut off, or
since it has struck this peer, which it does twice before it begins anew."""
_PEERS_MAX = 4096
_FILE_BYTES_MAX = 4 << 20
_WHY_MAX = 200


@dataclass
class _Record:
    strikes: int = 0
    exclusions: int = 0
    until_round: int = 0
    accepted: int = 0
    """Rounds in which its contribution counted here, 8 at most."""
    counted: int = 0
    """Rounds in which, as an owner, it counted what this peer contributed; see `counts_me`."""
    barred_until_s: float = 0.0
    """In the swarm's time."""
    barred_for_s: float = 0.0
    expelled: str = ""
    """What it was shown to have done; empty: nothing."""


class Standing:
    """What one peer thinks of the others, by the evidence it has seen itself."""

    def __init__(self, run: str = "", path: Path | None = None) -> None:
        """Take back what the file at `path` holds of a run, if there is one; else all are new."""
        self._run, self._path = run, path
        self._records = {} if path is None else _read(run, path)
        self._usual_rms: dict[int, float] = {}
        self._changed = False

    def usual_rms(self, fragment: int) -> float:
        """Return the root mean square of the fragment's last mean; 0 before there was one."""
        return self._usual_rms.get(fragment, 0.0)

    def observe_means(self, fragment: int, elements: int, square: float) -> None:
        """Hear how many elements of a fragment were committed, and the sum of their squares."""
        if elements:
            self._usual_rms[fragment] = math.sqrt(square / elements)

    def observe(self, peer_id: str, round_index: int, *, rejected: bool) -> None:
        """Hear how a peer's contribution to round `round_index` was judged."""
        record = self._of(peer_id)
        if not rejected:
            self._changed |= record.accepted < FULL_ROUNDS
            record.accepted = min(record.accepted + 1, FULL_ROUNDS)
            record.strikes = 0
            return
        record.strikes += 1
        if record.strikes >= _STRIKES:
            rounds = min(_EXCLUDED_ROUNDS << record.exclusions, _EXCLUDED_ROUNDS_MAX)
            record.until_round = round_index + 1 + rounds
            record.exclusions = min(record.exclusions + 1, 16)
            record.strikes = 0
            record.accepted = 0
            self._changed = True

    def observe_owner(self, peer_id: str, *, counted: bool) -> None:
        """Hear whether a peer's means, of all its slices, had this peer's contribution."""
        record, most = self._of(peer_id), FULL_ROUNDS + _UNSEEN_ROUNDS
        before = record.counted
        record.counted = min(before + 1, most) if counted else max(0, before - _UNSEEN_ROUNDS)
        self._changed |= record.counted != before

    def counts_me(self, peer_id: str) -> int:
        """Return in how many rounds a peer must have accepted this one, 8 at most.

        If it is honest it has `accepted` as often at least: who accepts takes into its means, who
        strikes leaves out.
        """
        record = self._records.get(peer_id)
        return max(0, record.counted - _UNSEEN_ROUNDS) if record is not None else 0

    def excluded(self, round_index: int) -> frozenset[str]:
        """Return the peers whose contributions do not count in round `round_index`."""
        return frozenset(p for p, r in self._records.items() if round_index < r.until_round)

    def expel(self, peer_id: str, why: str) -> None:
        """Have a peer that was shown to lie count as gone for good."""
        self._of(peer_id).expelled = why[:_WHY_MAX]
        self._changed = True
        self.save()

    def bar(self, peer_id: str, now_s: float) -> None:
        """Count a peer as gone for a while, since an anchor that it gave did harm."""
        record = self._of(peer_id)
        record.barred_for_s = min(max(_BARRED_S, 2 * record.barred_for_s), _BARRED_S_MAX)
        record.barred_until_s = now_s + record.barred_for_s
        self._changed = True
        self.save()

    def expelled(self, peer_id: str) -> bool:
        """Say whether a peer was shown to lie."""
        record = self._records.get(peer_id)
        return record is not None and bool(record.expelled)

    def all_expelled(self) -> dict[str, str]:
        """Return who was shown to lie, by id, and how; any thread may ask."""
        records = self._records.copy()  # at once: the loop's thread changes them
        return {peer_id: record.expelled for peer_id, record in records.items() if record.expelled}

    def trusts(self, peer_id: str, clock: Callable[[], float]) -> bool:
        """Say whether a peer is neither expelled nor barred by `clock`, the swarm's time."""
        record = self._records.get(peer_id)
        if record is None or (not record.expelled and not record.barred_for_s):
            return True
        return not record.expelled and clock() >= record.barred_until_s

    def knows(self, peer_id: str) -> bool:
        """Say whether a peer's contribution has counted here, and nothing speaks against it."""
        record = self._records.get(peer_id)
        return record is not None and record.accepted > 0 and not record.expelled

    def knows_anybody(self, me: str) -> bool:
        """Say whether there is such a peer beside this one; any thread may ask."""
        records = self._records.copy()  # at once: the loop's thread changes them
        return any(peer_id != me and self.knows(peer_id) for peer_id in records)

    def lowered(self, me: str, members: Sequence[str], weights: Sequence[int]) -> tuple[int, ...]:
        """Return what members weigh in a round that this peer leads, of what they claim.

        In proportion to the rounds in which each was accepted here, beside who was most often, up
        to 8. Where all are new nobody is lowered. Who has a weight keeps some.
        """
        accepted = [r.accepted if (r := self._records.get(m)) else 0 for m in members]
        most = max((n for n, m in zip(accepted, members, strict=True) if m != me), default=0)
        return tuple(
            weight if member == me or not weight else max(1, weight * (1 + n) // (1 + most))
            for member, weight, n in zip(members, weights, accepted, strict=True)
        )

    def save(self) -> None:
        """Write the file if there is news; a full disk costs the memory of it, nothing else."""
        if self._path is None or not self._changed:
            return
        body = {"run": self._run, "peers": {p: asdict(r) for p, r in self._records.items()}}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as temporary:
                temporary.write_text(json.dumps(body) + "\n", encoding="utf-8")
        except OSError as error:
            _log.warning("what this peer thinks of others, %s, cannot be written: %s",
                         self._path, error)  # fmt: skip
        self._changed = False

    def _of(self, peer_id: str) -> _Record:
        """Return a peer's record. The one that was made first goes where there are too many.

        Of those who were expelled not before all others.
        """
        if peer_id not in self._records and len(self._records) >= _PEERS_MAX:
            others = (p for p, r in self._records.items() if not r.expelled)
            del self._records[next(others, next(iter(self._records)))]
        return self._records.setdefault(peer_id, _Record())


def _read(run: str, path: Path) -> dict[str, _Record]:
    """Return what a file holds; nothing if it is not there, damaged, or of another run."""
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(_FILE_BYTES_MAX))
        if body["run"] != run:
            return {}
        return {str(p): _record(entry) for p, entry in [*body["peers"].items()][-_PEERS_MAX:]}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        _log.warning("what this peer thought of others, %s, cannot be read: %r", path, error)
        return {}


def _record(entry: object) -> _Record:
    if not isinstance(entry, dict):
        raise TypeError("not a record")
    record = _Record(**entry)
    for field in fields(_Record):
        value: object = getattr(record, field.name)
        endless = isinstance(value, float) and not math.isfinite(value)
        if type(value) is not type(field.default) or endless:
            raise ValueError(f"{field.name} is {value!r}")
    return record
