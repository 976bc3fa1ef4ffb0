"""What an exchange needs besides the group, and what a member holds after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch

from atomtrain.swarm.anchors.anchors import Snapshot
from atomtrain.swarm.anchors.updates import OuterUpdate
from atomtrain.swarm.codecs.codec import Codec
from atomtrain.swarm.membership.guards import Guard
from atomtrain.swarm.rounds.audits import Sign, Verify
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.owning import Offload, SliceMean
from atomtrain.swarm.rounds.proofs import Proven
from atomtrain.swarm.transport.transport import Channel


@dataclass
class ExchangeResult:
    """What a member holds after the exchange."""

    means: list[SliceMean | None]
    channels: list[Channel]
    """Streams that were used; nothing of this member's is sent any more."""
    values: torch.Tensor
    """1-D float32 of the fragment's size: what the means lie in, at their places."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Peers whose contribution, or mean, this member did not accept on evidence, and why."""
    lied: dict[str, str] = field(default_factory=dict)
    """Peers whose mean an audit has shown to be wrong, and why."""
    accepted: tuple[str, ...] = ()
    """Peers whose contribution is in each of this member's slices."""
    counted: dict[str, bool] = field(default_factory=dict)
    """Of owners whose means all came: whether this member's contribution is in each."""
    bases: Bases | None = None
    """What the means are to be added to, in rounds that have bases."""
    proofs: list[Proven] = field(default_factory=list)
    """What shows others that a mean is wrong."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each slice's mean, empty where it is missing."""
        return tuple("" if mean is None else mean.digest for mean in self.means)


@dataclass(frozen=True, kw_only=True)
class ExchangeSetup:
    """What an exchange needs besides the group."""

    peer_id: str
    snapshot: Snapshot
    codec: Codec
    open: Callable[[str], Awaitable[Channel]]
    """Opens a stream on which this protocol has been agreed."""
    offload: Offload
    leader: str = ""
    """Who leads the round."""
    counted: int = 0
    """In how many rounds it must have accepted this member's contributions, 8 at most."""
    sign: Sign
    """Signs in this peer's name."""
    verify: Verify
    update: OuterUpdate = field(default_factory=OuterUpdate)
    """What members apply by themselves, in rounds that have bases."""
    guard: Guard = field(default_factory=Guard)
    usual_rms: float = 0.0
    """Root mean square of the fragment's last mean; 0: there was none."""
    excluded: frozenset[str] = frozenset()
    """Peers whose contributions this member does not count."""
    on_unreachable: Callable[[str], None] = field(default=lambda _: None)
    """Told about members to which no stream can be opened."""
