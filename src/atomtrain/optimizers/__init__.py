"""Optimizers for the host, groups of parameters, and learning rates as functions of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atomtrain.lazy import getter

if TYPE_CHECKING:
    from atomtrain.optimizers.elementwise import SGD, AdamW
    from atomtrain.optimizers.groups import decay_groups, layer_groups, muon_groups
    from atomtrain.optimizers.masters import MASTER_BYTES
    from atomtrain.optimizers.moments import BYTES_PER_PARAMETER
    from atomtrain.optimizers.muon import Muon
    from atomtrain.optimizers.schedules import Schedule

__all__ = [
    "BYTES_PER_PARAMETER",
    "MASTER_BYTES",
    "SGD",
    "AdamW",
    "Muon",
    "Schedule",
    "decay_groups",
    "layer_groups",
    "muon_groups",
]

__getattr__ = getter(
    "atomtrain.optimizers",
    {
        "BYTES_PER_PARAMETER": "atomtrain.optimizers.moments",
        "MASTER_BYTES": "atomtrain.optimizers.masters",
        "SGD": "atomtrain.optimizers.elementwise",
        "AdamW": "atomtrain.optimizers.elementwise",
        "Muon": "atomtrain.optimizers.muon",
        "Schedule": "atomtrain.optimizers.schedules",
        "decay_groups": "atomtrain.optimizers.groups",
        "layer_groups": "atomtrain.optimizers.groups",
        "muon_groups": "atomtrain.optimizers.groups",
    },
)
