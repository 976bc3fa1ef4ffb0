"""The members as this peer knows them: their last records, and who did not answer since."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import (
    SLACK_VERSIONS,
    Limit,
    RunAge,
    Stamp,
    best_of,
    siblings,
    supersedes,
)
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.agenda import group_count
from atomtrain.swarm.membership.claims import Claims
from atomtrain.swarm.membership.records import (
    JOINING,
    LEFT,
    TRAINING,
    PeerRecord,
    PeerStatus,
    manifest_of,
)
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.transport.addresses import circuits_to

_log = logging.getLogger("atomtrain.swarm")
_IMPATIENT_ROUNDS = 16
_TOLD_MAX = 64
"""Peers of which the log is told that they do not count: ids cost nothing."""
_REFUSED_MAX = 4096
"""Digests of anchors that are remembered because this peer will not have them."""
_STRANGE_S, _MISSED_MAX = 60.0, 7
"""How long a peer counts as gone that was never met and does not answer; twice as long each time,
up to so often."""
_GONE_MAX = 4096
"""Peers without a record that are remembered: ids cost nothing, memory does."""


class Holder(NamedTuple):
    """A peer that has a fragment's anchor; the better donor sorts first."""

    stale: bool
    """Another peer has a better anchor."""
    joining: bool
    peer_id: str
    lonely: bool = False
    """No other peer says that it has the same anchor, though some agree on one."""


class Roster:
    """Records by peer; plain bookkeeping, fed from the directory."""

    def __init__(
        self,
        admission: Admission,
        fragments: int,
        manifest: str = "",
        group_size: int = 0,
        age: RunAge | None = None,
        standing: Standing | None = None,
        claims: Claims | None = None,
    ) -> None:
        """Start with nobody but the peer whose rule of admission this is.

        `manifest`: what records say of the manifest; those that say something else do not count.
        `group_size`: members of a round at most; 0: all. `age`: that of the run; None: not known.
        `standing`: what this peer thinks of the others. `claims`: which of their claims count;
        None: all.
        """
        self._claims = claims
        self._standing = standing or Standing()
        self._age = age or RunAge()
        self._group_size = group_size
        self.manifest = manifest
        self._peer_id = admission.peer_id
        self._admission = admission
        self._fragments = fragments
        self._records: dict[str, PeerRecord] = {}
        self._own: PeerRecord | None = None
        self._suspects: dict[str, float] = {}
        self._missed: dict[str, int] = {}
        """How often in a row those failed that have never been met."""
        self._met: set[str] = set()
        self._sequences: dict[str, float] = {}
        self._left: set[str] = set()
        self._late: dict[str, int] = {}
        self._doubted: set[str] = set()
        """Whose present record claims what cannot be."""
        self._refused: dict[str, float] = {}
        """By digest of an anchor that did harm: until when that counts; the last comes last."""
        self._told: set[str] = set()
        """Of whom the log has been told why nothing that they say counts."""
        self.of_another: frozenset[str] = frozenset()
        """Peers with a record of a run of this name whose manifest is another one."""
        self.addresses: dict[str, tuple[str, ...]] = {}
        """Where peers that were members once, and did not say goodbye, can be dialled."""

    def set_own(self, record: PeerRecord) -> None:
        """Keep what this peer publishes."""
        self._own = record

    def update(self, found: dict[str, bytes]) -> None:
        """Replace the others' records by those in the directory.

        Malformed ones, those of peers that are not admitted, and those that are older than what
        their peer was known to have said, do not count.
        """
        records, of_another = {}, set()
        for peer_id, data in found.items():
            if peer_id == self._peer_id:
                continue
            try:
                own = self._admission.unseal(peer_id, data)
                if manifest_of(own) != self.manifest:
                    of_another.add(peer_id)
                    continue
                record = PeerRecord.decode(peer_id, own, self._fragments)
            except BadMessage as error:
                _log.debug("record of %s ignored: %s", peer_id[-8:], error)
                continue
            if record.sequence < self._sequences.get(peer_id, -1.0):
                if peer_id in self._records:
                    records[peer_id] = self._records[peer_id]
                continue
            self._sequences.pop(peer_id, None)
            self._sequences[peer_id] = record.sequence  # who was seen last comes last
            if record.state == LEFT:
                self._left.add(peer_id)
                self.addresses.pop(peer_id, None)
            else:
                self._left.discard(peer_id)
                records[peer_id] = record
                self.addresses[peer_id] = record.addresses
        self._records, self.of_another = records, frozenset(of_another)
        self._look()
        if self._claims is not None:
            self._claims.look(self._records.values(), self._own_stamps)
        gone = [peer_id for peer_id in self._sequences if peer_id not in records]
        for peer_id in gone[:-_GONE_MAX]:
            for known in (
                self._sequences, self._suspects, self._late, self._missed, self.addresses,
            ):  # fmt: skip
                known.pop(peer_id, None)
            self._left.discard(peer_id)
            self._met.discard(peer_id)

    def _look(self) -> None:
        """See anew whose record claims what does not count."""
        limit, refused = self._age.limit, self.refused
        self._doubted = {
            r.peer_id for r in self._records.values() if self._doubts(r, limit, refused)
        }

    def _doubts(self, record: PeerRecord, limit: Limit, refused: Collection[str]) -> bool:
        """Say whether a record claims an anchor that does not count for this peer.

        One that there cannot be, which the log is told; or one that did harm here.
        """
        claims = (limit.refusal(stamp) for stamp in record.stamps if stamp is not None)
        if refusal := next(filter(None, claims), ""):
            self._tell(record.peer_id, f"it claims an anchor of {refusal}")
        return bool(refusal) or any(s is not None and s.digest in refused for s in record.stamps)

    @property
    def refused(self) -> Collection[str]:
        """Digests of the anchors that this peer will not have."""
        now_s = self._age.now_s
        return {digest for digest, until_s in self._refused.items() if now_s < until_s}

    def refuse(self, digest: str, for_s: float = math.inf) -> None:
        """Remember for so long an anchor that did harm: who claims it counts as gone meanwhile."""
        self._refused.pop(digest, None)
        self._refused[digest] = self._age.now_s + for_s
        while len(self._refused) > _REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        self._look()

    def claimants(self, digest: str) -> set[str]:
        """Return the others that say they have an anchor."""
        return {r.peer_id for r in self.others
                if any(s is not None and s.digest == digest for s in r.stamps)}  # fmt: skip

    def bar(self, peer_id: str) -> None:
        """Count a peer as gone for a while, since an anchor that it gave did harm."""
        self._standing.bar(peer_id, self._age.now_s)

    def distrust(self, peer_id: str, why: str) -> None:
        """Count a peer as gone from now on, whatever records it publishes."""
        self._standing.expel(peer_id, why)
        self._tell(peer_id, why)

    def _tell(self, peer_id: str, why: str) -> None:
        if peer_id not in self._told and len(self._told) < _TOLD_MAX:
            self._told.add(peer_id)
            _log.warning("peer %s counts as gone: %s", peer_id[-8:], why)

    def sees(self, peer_id: str) -> bool:
        """Say whether there is a record of this peer, answering or not."""
        return peer_id in self._records

    def answers(self, peer_id: str) -> bool:
        """Say whether there is a record of this peer, and nothing failed with it since."""
        record = self._records.get(peer_id)
        return record is not None and self.reachable(record)

    def trains(self, peer_id: str) -> bool:
        """Say whether a peer takes part in rounds, by its record."""
        record = self._records.get(peer_id)
        return record is not None and record.state == TRAINING

    @property
    def members(self) -> dict[str, tuple[str, ...]]:
        """Addresses of the members, this peer included, that are there now."""
        own = [self._own] if self._own is not None and self._own.state != LEFT else []
        return {record.peer_id: record.addresses for record in [*own, *self._records.values()]}

    @property
    def all_left(self) -> bool:
        """There were other peers, all of them have said goodbye, and nobody else is there."""
        return bool(self._left) and not self._records

    def suspect(self, peer_id: str) -> None:
        """Count a peer as gone until it publishes a newer record.

        One that was never met, for a minute and more: anybody can write records of made-up peers.
        """
        record = self._records.get(peer_id)
        if record is None:
            return
        self._suspects[peer_id] = record.sequence
        if peer_id not in self._met:
            missed = self._missed[peer_id] = min(self._missed.get(peer_id, 0) + 1, _MISSED_MAX)
            self._suspects[peer_id] += _STRANGE_S * (1 << missed - 1)

    @property
    def strangers(self) -> list[str]:
        """Peers that say they train, were never met, and have not failed lately."""
        return [r.peer_id for r in self.training()
                if r.peer_id not in self._met and r.peer_id != self._peer_id]  # fmt: skip

    def meet(self, peer_id: str) -> None:
        """Hear that a stream with a peer has proved that it is there."""
        if peer_id in self._met or peer_id not in self._records:
            return
        self._met.add(peer_id)
        if self._missed.pop(peer_id, 0):
            self._suspects.pop(peer_id, None)

    def met(self, peer_id: str) -> bool:
        """Say whether a stream with a peer has proved that it is, or was, there."""
        return peer_id in self._met

    def was_late(self, peer_id: str, round_index: int) -> None:
        """Note that a member did not answer in the time that this peer, leading, gave it."""
        self._late[peer_id] = round_index

    def patient_with(self, peer_id: str, round_index: int) -> bool:
        """Say whether a member's claims of being slow count: not soon after it came too late."""
        return round_index >= self._late.get(peer_id, -_IMPATIENT_ROUNDS) + _IMPATIENT_ROUNDS

    def reachable(self, record: PeerRecord) -> bool:
        """Say whether nothing failed with this peer since its last record, which can be true."""
        return self.trusts(record.peer_id) and record.sequence > self._suspects.get(
            record.peer_id, -1.0
        )

    def trusts(self, peer_id: str) -> bool:
        """Say whether a peer has neither claimed nor given what there cannot be, or did harm."""
        return peer_id not in self._doubted and self._standing.trusts(peer_id, self._age.clock)

    @property
    def others(self) -> list[PeerRecord]:
        """Records of the other peers that answer, newcomers included."""
        return [record for record in self._records.values() if self.reachable(record)]

    def training(self) -> list[PeerRecord]:
        """Return the members that take part in rounds, this peer included if it does."""
        own = [self._own] if self._own is not None else []
        return [record for record in [*own, *self.others] if record.state == TRAINING]

    @property
    def may_answer_again(self) -> bool:
        """Some member that was met failed since its last record, which has not expired yet.

        Whether it is dead or one stream broke shows when the record is renewed, or expires.
        """
        return any(r.state == TRAINING and r.peer_id in self._met and self.trusts(r.peer_id)
                   and not self.reachable(r) for r in self._records.values())  # fmt: skip

    @property
    def groups(self) -> int:
        """Into how many groups the members that take part are divided now."""
        return group_count(len(self.training()), self._group_size)

    @property
    def _own_stamps(self) -> Sequence[Stamp | None]:
        return (None,) * self._fragments if self._own is None else self._own.stamps

    def best(self, *, certain: bool = False) -> list[Stamp | None]:
        """Return the best stamp of each fragment among the others that answer.

        Of claims that count, or of those only that count in a round: the `certain` ones.
        """
        return self._best_of(self.others, certain=certain)

    def _best_of(
        self, records: Sequence[PeerRecord], *, certain: bool = False
    ) -> list[Stamp | None]:
        return [
            best_of(
                record.stamps[fragment]
                for record in records
                if self._counts(record, fragment, certain=certain)
            )
            for fragment in range(self._fragments)
        ]

    def _counts(self, record: PeerRecord, fragment: int, *, certain: bool = False) -> bool:
        counts = self.certain if certain else self.counts
        stamp = record.stamps[fragment]
        return counts(record.peer_id, fragment, stamp, self._own_stamps[fragment])

    def certain(self, peer_id: str, fragment: int, stamp: Stamp | None, own: Stamp | None) -> bool:
        """Say whether what a peer claims counts in a round, beside an anchor of this peer's."""
        if self._claims is None or self._takes_all(peer_id):
            return True
        return self._claims.certain(peer_id, fragment, stamp, own)

    def counts(self, peer_id: str, fragment: int, stamp: Stamp | None, own: Stamp | None) -> bool:
        """Say whether what a peer claims counts for whoever looks for something to fetch."""
        if self._claims is None or self._takes_all(peer_id):
            return True
        return self._claims.counts(peer_id, fragment, stamp, own)

    def _takes_all(self, peer_id: str) -> bool:
        """Say whether all that a peer claims counts: it is this one, or this one is a newcomer."""
        newcomer = self._own is None or self._own.state == JOINING
        return peer_id == self._peer_id or newcomer

    def holders(self, fragment: int, slack: int = 0) -> list[Holder]:
        """Return the others that have the fragment, those with its best stamp first.

        Siblings of the best, so many versions apart at most, are as good. Whose claim does not
        count is none of them.
        """
        having = [(r, stamp) for r in self.others if (stamp := r.stamps[fragment]) is not None
                  and self._counts(r, fragment)]  # fmt: skip
        best = best_of(stamp for _, stamp in having)
        claimed = Counter(stamp for _, stamp in having)
        agreed = max(claimed.values(), default=0) > 1
        return sorted(
            Holder(
                not siblings(stamp, best, slack),
                record.state == JOINING,
                record.peer_id,
                lonely=agreed and claimed[stamp] == 1,
            )
            for record, stamp in having
            if best is not None
        )

    def having(self, fragment: int) -> list[PeerRecord]:
        """Return the others whose record says that they have a fragment, answering or not."""
        return [record for record in self._records.values()
                if record.stamps[fragment] is not None and self.trusts(record.peer_id)]  # fmt: skip

    def next_round(self) -> int:
        """Return the largest round that any peer has before it."""
        rounds = (r.next_round for r in self._records.values() if self.trusts(r.peer_id))
        return max(rounds, default=0)

    def statuses(self) -> list[PeerStatus]:
        """Return all members, this peer first."""
        own = [self._own] if self._own is not None else []
        records = [*own, *self._records.values()]
        best = self._best_of([*own, *self.others])
        slack = SLACK_VERSIONS if self.groups > 1 else 0
        return [
            PeerStatus(
                peer_id=record.peer_id,
                name=record.name or record.peer_id[-8:],
                is_self=record.peer_id == self._peer_id,
                state=record.state,
                next_round=record.next_round,
                steps=record.steps,
                tokens=record.tokens,
                tokens_per_s=record.tokens_per_s,
                step_s=record.step_s,
                free_bytes_per_s=record.free_bytes_per_s,
                behind=_behind(record.stamps, best, slack),
                reachable=record.peer_id == self._peer_id or self.reachable(record),
                addresses=record.addresses,
                seen_s=record.sequence,
                relays=len(circuits_to(record.peer_id, record.addresses)),
            )
            for record in records
        ]


def _behind(stamps: Sequence[Stamp | None], best: Sequence[Stamp | None], slack: int) -> int:
    """Return how many fragments are older than they might be."""
    return sum(
        stamp != other
        and (slack == 0 or stamp is None or other is None or supersedes(other, stamp, slack))
        for stamp, other in zip(stamps, best, strict=True)
    )
