"""Peers that train one model together: membership, rounds, outer update, state transfer.

`Swarm` is what the training loop uses. Importing this package is light; hivemind is imported when
a swarm is founded or joined.
"""

from atomtrain.swarm.anchors.anchor_store import FragmentAccess
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.membership.config import Manifest, Rules, SwarmConfig
from atomtrain.swarm.membership.records import PeerStatus
from atomtrain.swarm.swarm import Progress, Swarm, SwarmState

__all__ = [
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
