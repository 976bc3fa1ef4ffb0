"""Peers that train one model together: membership, rounds, outer update, state transfer.

`Swarm` is what the training loop uses. Importing this package is light; hivemind is imported when
a swarm is founded or joined.
"""

from atomtrain.swarm.anchor_store import FragmentAccess
from atomtrain.swarm.config import Manifest, Rules, SwarmConfig
from atomtrain.swarm.desk import RoundReport
from atomtrain.swarm.records import PeerStatus
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
