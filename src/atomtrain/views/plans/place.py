"""Where a model would train: a GPU of the catalogue, or this machine as it is measured."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import (
    LayerTime,
    estimated_times,
    flops_per_s,
    measured_bytes,
)
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration.profile_cache import machine_key
from atomtrain.engine.calibration.profiling import profiled_machine, take_profile
from atomtrain.engine.calibration.update_rates import measured_updates
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.state.precision import PRECISIONS
from atomtrain.planning.catalogue import MATMUL_SHARE, Gpu, estimate_times
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.updating import UpdateModel
from atomtrain.planning.search.batch_search import Analysis, Compute
from atomtrain.views.plans.subject import MeasureUpdates

_MOST_MEASURED_BYTES = 1 << 30
"""Layers that need more to be measured are estimated: planning must not need a large machine."""


class Place(NamedTuple):
    """Link, host and budgets, and whose compute counts: `card` or `local` is given."""

    machine: Machine
    card: Gpu | None = None
    local: Compute | None = None
    updates: MeasureUpdates | None = None
    """Measures the optimizer where compute is `local`; `None` leaves estimates as they are."""
    crowded_share: float = 0.0
    """What other programs had of the processor while `machine` was measured."""


def compute_of(card: Gpu, dtype: str) -> Compute:
    """Return how fast a GPU of the catalogue computes; `dtype` is that of matrix products."""
    peak = card.peak_flops_per_s(dtype)
    return Compute(
        lambda analysis: estimate_times(analysis.costs, card, dtype),
        MATMUL_SHARE[dtype] * peak,
        peak,
    )


def this_place(
    device_memory_bytes: int | None,
    precision: str = "fp32",
    *,
    clips: bool = False,
    again: bool = False,
) -> Place:
    """Measure this machine: its link, host optimizer, disk and matrix products.

    Layers are measured when their times are first asked for.

    Args:
        device_memory_bytes: Budget; `None` is the device's own.
        precision: What layers compute in: `fp32`, `bf16` or `fp16`.
        clips: Whether updates multiply gradients in their own type.
        again: Forget what was measured before.

    Raises:
        ConfigError: the budget is more than the GPU has.
    """
    device = open_device("auto", device_memory_bytes)
    try:
        profile = profiled_machine(device, measured_overhead, again=again)
        dtype = PRECISIONS.get(precision, torch.float32)
        rate = flops_per_s(device.torch_device, device.synchronize, dtype)
        key, on_gpu = machine_key(device), device.torch_device.type != "cpu"
    finally:
        device.close()

    def updates(model: UpdateModel, optimizer: Optimizer, chain: Chain) -> UpdateModel:
        return measured_updates(model, optimizer, chain, key, one_processor=not on_gpu, clips=clips)

    local = Compute(_Measured(rate, device_memory_bytes), rate, rate)
    return Place(profile.machine, local=local, updates=updates, crowded_share=profile.crowded_share)


class _Measured:
    """Times of layers: measured for the first size of a micro-batch, scaled by FLOPs for others."""

    def __init__(self, rate_flops_per_s: float, device_memory_bytes: int | None) -> None:
        self._rate, self._device_memory_bytes = rate_flops_per_s, device_memory_bytes
        self._ratios: dict[str, LayerTime] | None = None

    def __call__(self, analysis: Analysis) -> Mapping[str, LayerTime]:
        estimates = estimated_times(analysis.costs, self._rate)
        if self._ratios is None:
            measured = self._measure(analysis) or estimates
            self._ratios = {kind: _each(measured[kind], estimates[kind]) for kind in estimates}
        ratios = {kind: self._ratios.get(kind, LayerTime(1.0, 1.0)) for kind in estimates}
        return {
            kind: LayerTime(
                time.forward_s * ratios[kind].forward_s, time.backward_s * ratios[kind].backward_s
            )
            for kind, time in estimates.items()
        }

    def _measure(self, analysis: Analysis) -> Mapping[str, LayerTime] | None:
        distinct = {cost.kind: cost for cost in analysis.costs.layers}.values()
        if max(map(measured_bytes, distinct)) > _MOST_MEASURED_BYTES:
            return None
        device = open_device("auto", self._device_memory_bytes)
        try:
            chain = _with_data(analysis.chain, analysis.costs)
            return take_profile(device, chain, analysis.costs, {}, measured_overhead).times
        finally:
            device.close()


def _each(measured: LayerTime, estimated: LayerTime) -> LayerTime:
    return LayerTime(
        measured.forward_s / estimated.forward_s, measured.backward_s / estimated.backward_s
    )


def _with_data(chain: Chain, costs: ChainCosts) -> Chain:
    """Return the chain with real weights, random ones, in the first layer of each kind."""
    layers, seen = [], set()
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        layers.append(layer if cost.kind in seen else _filled(layer))
        seen.add(cost.kind)
    return dataclasses.replace(chain, layers=tuple(layers))


def _filled(layer: Layer) -> Layer:
    # What an exported layer runs is the same for all, and knows tensors that have no copies.
    shared = [getattr(layer.module, name, None) for name in ("template", "mode", "other")]
    memo = {id(part): part for part in shared if part is not None}
    module = copy.deepcopy(layer.module, memo).to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            # Not what the memory held before: denormal numbers are slow.
            if tensor.is_floating_point():
                tensor.normal_(std=0.02, generator=random)
            else:
                tensor.zero_()
    return dataclasses.replace(layer, module=module)
