"""Whether a run first compares a small model's layers with the model itself, and does so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from atomtrain.analysis.layers.checking import check_chain
from atomtrain.analysis.layers.trace import MicroBatch, chain_of
from atomtrain.engine.engine import Engine
from atomtrain.models import HuggingFaceConfig
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import Objective
from atomtrain.units import format_bytes

MOST_BYTES = 1 << 30
"""Of parameters, up to which a model is compared without being asked: the check takes twice as much
for gradients."""
MOST_S = 20.0
"""Seconds of the check, as estimated, up to which a model is compared without being asked."""
_RUNS = 2
_FLOPS_A_THREAD = 20e9
"""What a thread of a processor computes in a second, roughly and rather too little."""
_log = logging.getLogger("atomtrain.training")


def check_model(
    engine: Engine,
    recipe: Recipe,
    options: TrainOptions,
    objective: Objective,
    example: MicroBatch,
    tell: Callable[[str], None],
) -> None:
    """Compare the layers' loss and gradients with the model's own, if that is wanted.

    Raises:
        AnalysisError: they differ.
    """
    if options.check_model == "never" or not isinstance(recipe.sizes, HuggingFaceConfig):
        return
    if options.check_model == "auto" and (reason := _too_much(engine)):
        _log.info("the model is not compared with its layers: %s", reason)
        return
    tell("comparing the layers with the model, on one micro-batch")
    engine.synchronize()
    traced = engine.traced
    if engine.device.torch_device.type != "cpu":
        traced = chain_of(engine.model, example, objective.loss)
    check_chain(engine.model, traced, example)


def _too_much(engine: Engine) -> str:
    """Return why a model is not compared unless that is asked for, `""` if it is."""
    if "parameters" in engine.plan.on_disk:
        return "parameters are on disk"
    n_bytes = sum(parameter.nbytes for parameter in engine.model.parameters())
    if n_bytes > MOST_BYTES:
        return f"it has {format_bytes(n_bytes)} of parameters, more than {format_bytes(MOST_BYTES)}"
    layers = engine.planner.costs.layers
    flops = sum(layer.forward_flops + layer.backward_flops for layer in layers)
    seconds = _RUNS * flops / (_FLOPS_A_THREAD * torch.get_num_threads())
    return f"it would take {seconds:.0f} s, more than {MOST_S:.0f} s" if seconds > MOST_S else ""
