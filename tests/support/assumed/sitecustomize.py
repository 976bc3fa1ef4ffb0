"""Stands for a machine whose rates never change: layers cost next to nothing, the link is slow.

So plans are always the same, and take as much of the device as they may. Python imports this by
itself where the folder is on `PYTHONPATH`.
"""

from __future__ import annotations

from typing import Any

from atomtrain.analysis import Chain, LayerTime
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.engine import api
from atomtrain.engine.calibration import machines
from atomtrain.engine.calibration.profiling import Profile

_LAYER_S = 1e-4


def _profile(device: Any, _: Chain, costs: ChainCosts, *__: Any, **___: Any) -> Profile:
    times = {cost.kind: LayerTime(_LAYER_S, 3 * _LAYER_S) for cost in costs.layers}
    return Profile(machines.assumed_machine(device), times)


api.take_profile = _profile
api.measured_updates = lambda model, *_, **__: model
machines.update_parameters_per_s = lambda *_: 1e9
