"""Measures what a visit costs beside its layers: a model of next to nothing is really trained."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from atomtrain.analysis.costs import layer_costs
from atomtrain.analysis.profile import layer_times
from atomtrain.analysis.storages import StorageTracker
from atomtrain.analysis.trace import chain_of
from atomtrain.planning.schedule import training_visits
from atomtrain.swapping.emulated import EmulatedDevice

_LAYERS = 6
_PRODUCTS = 6
"""Twelve parameters a layer, as a block of a transformer has: each is prepared at each visit."""
_WIDTH = 16
_MICRO_BATCHES = 4
_WARMUP_STEPS = 2
_STEPS = 9
_MEMORY_BYTES = 1 << 20
_LINK_BYTES_PER_S = 1e11


def emulated_visit_s() -> float:
    """Return the seconds of a micro-batch of a visit, layers not counted, on the emulated device.

    There the computing thread itself hands values and gradients over to the streams. Takes a
    fraction of a second.
    """
    from atomtrain.swapping.opening import swap  # it imports what imports this
    from atomtrain.swapping.options import Options

    with torch.random.fork_rng([]):
        model = nn.Sequential(*(_layer() for _ in range(_LAYERS)))
        example = torch.ones(_WIDTH, _WIDTH)
        traced = chain_of(model, example, torch.sum)
        inputs = traced.bind(example)
        costs = layer_costs(traced.chain, inputs)
        with swap(
            model,
            example,
            optimizer=torch.optim.AdamW,
            device=EmulatedDevice(_MEMORY_BYTES, _LINK_BYTES_PER_S),
            loss=torch.sum,
            options=Options(micro_batches=_MICRO_BATCHES, segments=_LAYERS, profile=False),
        ) as engine:
            seconds = []
            for _ in range(_WARMUP_STEPS + _STEPS):
                started_s = time.perf_counter()
                engine.step([example] * _MICRO_BATCHES)
                seconds.append(time.perf_counter() - started_s)
            engine.synchronize()  # the last step's updates write what is timed next
            visits = training_visits(engine.plan.shape)
            times = layer_times(
                traced.chain, costs, inputs, torch.device("cpu"), lambda: None, StorageTracker
            )
    step_s = statistics.median(seconds[_WARMUP_STEPS:]) / _MICRO_BATCHES
    layers_s = 0.0
    for visit in visits:
        for cost in costs.layers[slice(*visit.layers)]:
            layer_time = times[cost.kind]
            backward = visit.gradient is not None
            layers_s += layer_time.backward_s if backward else layer_time.forward_s
    return max(0.0, step_s - layers_s) / len(visits)


def _layer() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_PRODUCTS)))
