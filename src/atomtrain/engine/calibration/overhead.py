"""Measures what compute spends beside layers: a model of next to nothing is really trained.

What is measured is the computing thread's own processor time. A step of next to nothing mostly
waits, for threads to wake and for whatever else runs on the machine, and the waits of real steps
are part of the plan's timeline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from atomtrain.analysis.costs.costs import ChainCosts, layer_costs
from atomtrain.analysis.costs.profile import layer_times
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.trace import chain_of
from atomtrain.engine.devices.emulated import EmulatedDevice
from atomtrain.planning.cost.saved import SavedTensors
from atomtrain.planning.plan.schedule import training_visits
from atomtrain.planning.plan.shape import Activation, Shape

_LAYERS = 6
_WIDTH = 16
_MICRO_BATCHES = 4
_WARMUP_STEPS = 2
_STEPS = 9
_MEMORY_BYTES = 1 << 20
_LINK_BYTES_PER_S = 1e11


class Overhead(NamedTuple):
    """What compute itself spends on handing over, where it is the processor's."""

    visit_s: float
    """On a micro-batch of a visit."""
    offloaded_storage_s: float
    """On a storage that is sent to the host to wait for backward, and again on its way back."""


MeasureOverhead = Callable[[], Overhead]
"""Measures it on the emulated device."""
Swap = Callable[..., Any]
"""Opens an engine as `atomtrain.swap` does, but takes the fields of `Options` one by one."""


class Sample(NamedTuple):
    """A step of the model, of one micro-batch: what it took, and what is known of that."""

    step_s: float
    layers_s: float
    """Of the step, what layers compute."""
    visits: int
    storages: int
    """That were offloaded."""


def emulated_overhead(swap: Swap) -> Overhead:
    """Return what compute spends beside layers on the emulated device.

    There the computing thread itself hands values, gradients and what is saved over to the streams.
    Takes a second at most.

    Args:
        swap: Opens an engine. Opening one asks for this, so it is not imported here.
    """
    with torch.random.fork_rng([]):
        return overhead_of(_sample(swap, "recompute"), _sample(swap, "offload"))


def overhead_of(recomputed: Sample, offloaded: Sample) -> Overhead:
    """Return what explains two samples; never negative."""
    visit_s = max(0.0, recomputed.step_s - recomputed.layers_s) / recomputed.visits
    known_s = offloaded.layers_s + offloaded.visits * visit_s
    each_s = max(0.0, offloaded.step_s - known_s) / max(1, 2 * offloaded.storages)
    return Overhead(visit_s, each_s)


def _sample(swap: Swap, activation: Activation) -> Sample:
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
        micro_batches=_MICRO_BATCHES,
        segments=_LAYERS,
        activations=activation,
        optimizer_on_device=False,
        profile=False,
    ) as engine:
        seconds = []
        for _ in range(_WARMUP_STEPS + _STEPS):
            started_s = time.thread_time()
            engine.step([example] * _MICRO_BATCHES)
            seconds.append(time.thread_time() - started_s)
        engine.synchronize()  # the last step's updates write what is timed next
        shape = engine.plan.shape
        times = layer_times(
            traced.chain,
            costs,
            inputs,
            torch.device("cpu"),
            lambda: None,
            StorageTracker,
            clock=time.thread_time,
        )
    layers_s = 0.0
    visits = training_visits(shape)
    for visit in visits:
        for cost in costs.layers[slice(*visit.layers)]:
            taken = times[cost.kind]
            if visit.gradient is None:
                layers_s += taken.forward_s
            else:
                layers_s += taken.backward_s - taken.forward_s * visit.finds
    return Sample(
        step_s=statistics.median(seconds[_WARMUP_STEPS:]) / _MICRO_BATCHES,
        layers_s=layers_s,
        visits=len(visits),
        storages=offloaded_storages(shape, traced.chain, costs),
    )


def offloaded_storages(shape: Shape, chain: Chain, costs: ChainCosts) -> int:
    """Return how many storages of a micro-batch wait on the host for backward."""
    saved = SavedTensors(chain, costs if shape.remakes else costs.sending_all())
    return sum(saved.of(*layers).sent for layers, how in shape.waiting.items() if how == "offload")


def _layer() -> nn.Module:
    """Return what a block of a transformer consists of: as many parameters, each of which is
    prepared at each visit, and operations that are done again where saved tensors are sent."""

    def product() -> nn.Module:
        return nn.Linear(_WIDTH, _WIDTH)

    norms = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
    return nn.Sequential(norms[0], product(), product(), norms[1], product(), nn.GELU(), product())
