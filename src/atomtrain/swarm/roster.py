"""The members as this peer knows them: their last records, and who did not answer since."""

from __future__ import annotations

import logging

from atomtrain.swarm.admission import Admission
from atomtrain.swarm.anchors import Stamp
from atomtrain.swarm.messages import BadMessage
from atomtrain.swarm.records import JOINING, LEFT, TRAINING, PeerRecord, PeerStatus, best_stamps

_log = logging.getLogger("atomtrain.swarm")


class Roster:
    """Records by peer; plain bookkeeping, fed from the directory."""

    def __init__(self, admission: Admission, fragments: int) -> None:
        """Start with nobody but the peer whose rule of admission this is."""
        self._peer_id = admission.peer_id
        self._admission = admission
        self._fragments = fragments
        self._records: dict[str, PeerRecord] = {}
        self._own: PeerRecord | None = None
        self._suspects: dict[str, float] = {}
        self.addresses: dict[str, tuple[str, ...]] = {}

    def set_own(self, record: PeerRecord) -> None:
        """Keep what this peer publishes."""
        self._own = record

    def update(self, found: dict[str, bytes]) -> None:
        """Replace the others' records by those in the directory.

        Malformed ones, and those of peers that are not admitted, do not count.
        """
        records = {}
        for peer_id, data in found.items():
            if peer_id == self._peer_id:
                continue
            try:
                own = self._admission.unseal(peer_id, data)
                record = PeerRecord.decode(peer_id, own, self._fragments)
            except BadMessage as error:
                _log.debug("record of %s ignored: %s", peer_id[-8:], error)
                continue
            if record.state != LEFT:
                records[peer_id] = record
                self.addresses[peer_id] = record.addresses
        self._records = records

    def suspect(self, peer_id: str) -> None:
        """Count a peer as gone until it publishes a newer record."""
        record = self._records.get(peer_id)
        if record is not None:
            self._suspects[peer_id] = record.sequence

    def reachable(self, record: PeerRecord) -> bool:
        """Say whether nothing failed with this peer since its last record."""
        return record.sequence > self._suspects.get(record.peer_id, -1.0)

    @property
    def others(self) -> list[PeerRecord]:
        """Records of the other peers that answer, newcomers included."""
        return [record for record in self._records.values() if self.reachable(record)]

    def training(self) -> list[PeerRecord]:
        """Return the members that take part in rounds, this peer included if it does."""
        own = [self._own] if self._own is not None else []
        return [record for record in [*own, *self.others] if record.state == TRAINING]

    def is_training(self) -> bool:
        """Say whether this peer has told others that it takes part."""
        return self._own is not None and self._own.state == TRAINING

    def best(self) -> list[Stamp | None]:
        """Return the best stamp of each fragment among the others that answer."""
        return best_stamps(self.others, self._fragments)

    def holders(self, fragment: int) -> list[str]:
        """Return the others that have the fragment, those with its best stamp first."""
        best = self.best()[fragment]
        having = [r for r in self.others if r.stamps[fragment] is not None]
        having.sort(key=lambda r: (r.stamps[fragment] != best, r.state == JOINING))
        return [record.peer_id for record in having]

    def next_round(self) -> int:
        """Return the largest round that any peer has before it."""
        return max((record.next_round for record in self._records.values()), default=0)

    def statuses(self) -> list[PeerStatus]:
        """Return all members, this peer first."""
        own = [self._own] if self._own is not None else []
        records = [*own, *self._records.values()]
        best = best_stamps(records, self._fragments)
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
                behind=sum(a != b for a, b in zip(record.stamps, best, strict=True)),
                reachable=record.peer_id == self._peer_id or self.reachable(record),
                addresses=record.addresses,
                seen_s=record.sequence,
            )
            for record in records
        ]
