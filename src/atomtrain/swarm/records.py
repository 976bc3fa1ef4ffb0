"""Membership records: what each peer tells all others about itself, and what they make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from atomtrain.swarm.anchors import Stamp
from atomtrain.swarm.messages import BadMessage

RECORD_BYTES_MAX = 8 << 20
_TEXT_MAX = 512
JOINING, TRAINING, LEFT = "joining", "training", "left"
_STATES = (JOINING, TRAINING, LEFT)


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """What a peer publishes. Untrusted until `decode` has checked its form; even then only a claim.

    `sequence` grows with each record of a peer, across restarts.
    """

    peer_id: str
    name: str
    state: str
    sequence: float
    addresses: tuple[str, ...]
    next_round: int
    steps: int
    tokens: int
    tokens_per_s: float
    step_s: float
    round_s: float
    """Time of this peer's recent rounds; 0: not measured yet."""
    stamps: tuple[Stamp | None, ...]

    def encode(self) -> bytes:
        """Return the record as JSON."""
        body = dict(self.__dict__)
        body["stamps"] = [
            None if s is None else [s.version, s.tokens, s.digest] for s in self.stamps
        ]
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, peer_id: str, data: bytes, fragments: int) -> PeerRecord:
        """Return the record that `peer_id` published.

        Raises:
            BadMessage: it is malformed, or speaks for another peer or another run.
        """
        if not isinstance(data, bytes) or len(data) > RECORD_BYTES_MAX:
            raise BadMessage("membership record is not bytes, or too long")
        try:
            body = json.loads(data)
            record = cls(
                peer_id=_text(body["peer_id"]),
                name=_text(body["name"]),
                state=_text(body["state"]),
                sequence=_number(body["sequence"]),
                addresses=tuple(_text(a) for a in body["addresses"][:16]),
                next_round=int(_number(body["next_round"])),
                steps=int(_number(body["steps"])),
                tokens=int(_number(body["tokens"])),
                tokens_per_s=_number(body["tokens_per_s"]),
                step_s=_number(body["step_s"]),
                round_s=_number(body["round_s"]),
                stamps=tuple(_stamp(item) for item in body["stamps"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadMessage(f"membership record cannot be read: {error!r}") from error
        if record.peer_id != peer_id or record.state not in _STATES:
            raise BadMessage("membership record of another peer, or in an unknown state")
        if len(record.stamps) != fragments:
            raise BadMessage(f"membership record has {len(record.stamps)} fragments")
        return record


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A member as displays show it."""

    peer_id: str
    name: str
    is_self: bool
    state: str
    """`joining`, `training` or `left`."""
    next_round: int
    steps: int
    tokens: int
    tokens_per_s: float
    step_s: float
    behind: int
    """Fragments whose anchor is older than the best known."""
    reachable: bool
    """False from a failed contact until the peer's next record."""
    addresses: tuple[str, ...]
    seen_s: float = 0.0
    """Unix time of the peer's last record, by its own clock; 0: never."""


def best_stamps(records: list[PeerRecord], fragments: int) -> list[Stamp | None]:
    """Return for each fragment the stamp that beats all others."""
    best: list[Stamp | None] = [None] * fragments
    for record in records:
        for fragment, stamp in enumerate(record.stamps):
            present = best[fragment]
            if stamp is not None and (present is None or stamp.beats(present)):
                best[fragment] = stamp
    return best


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_MAX:
        raise ValueError("not a short text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise ValueError("not a number in range")
    return value


def _stamp(value: Any) -> Stamp | None:
    if value is None:
        return None
    version, tokens, digest = value
    return Stamp(int(_number(version)), int(_number(tokens)), _text(digest))
