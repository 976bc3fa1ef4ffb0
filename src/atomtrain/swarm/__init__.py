"""Peers that train one model together: membership, rounds, outer update, state transfer.

`Swarm` is what the training loop uses. Importing this package is light; hivemind is imported when
a swarm is founded or joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomtrain.lazy import getter

if TYPE_CHECKING:
    from atomtrain.swarm.anchors.anchor_store import FragmentAccess
    from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
    from atomtrain.swarm.membership.config import Manifest, SwarmConfig
    from atomtrain.swarm.membership.records import PeerStatus
    from atomtrain.swarm.membership.rules import Rules
    from atomtrain.swarm.swarm import Progress, Swarm, SwarmState
    from atomtrain.swarm.transport.endpoint import Endpoint

__all__ = [
    "Endpoint",
    "FragmentAccess",
    "Manifest",
    "PeerStatus",
    "Progress",
    "RoundReport",
    "Rules",
    "Swarm",
    "SwarmConfig",
    "SwarmState",
]

__getattr__ = getter(
    "atomtrain.swarm",
    {
        "Endpoint": "atomtrain.swarm.transport.endpoint",
        "FragmentAccess": "atomtrain.swarm.anchors.anchor_store",
        "Manifest": "atomtrain.swarm.membership.config",
        "PeerStatus": "atomtrain.swarm.membership.records",
        "Progress": "atomtrain.swarm.swarm",
        "RoundReport": "atomtrain.swarm.anchors.trainer_mailbox",
        "Rules": "atomtrain.swarm.membership.rules",
        "Swarm": "atomtrain.swarm.swarm",
        "SwarmConfig": "atomtrain.swarm.membership.config",
        "SwarmState": "atomtrain.swarm.swarm",
    },
)
