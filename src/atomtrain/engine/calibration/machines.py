"""This machine as the planner sees it: measured, or looked up where nothing shall be measured.

What compute spends beside layers is measured too: a model of next to nothing is really trained, and
the computing thread's own processor time counts. Such a step mostly waits, for threads to wake and
for whatever else runs on the machine, and the waits of real steps are part of the plan's timeline.
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atomtrain.analysis.costs.costs import ChainCosts, layer_costs
from atomtrain.analysis.costs.profile import layer_times
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.analysis.layers.chain import Chain
from atomtrain.analysis.layers.trace import chain_of
from atomtrain.engine.calibration.disk_profile import storage_rates
from atomtrain.engine.calibration.probes import (
    Stolen,
    device_update_parameters_per_s,
    host_copy_bytes_per_s,
    link_rates,
    stolen,
    update_parameters_per_s,
)
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import host_memory
from atomtrain.engine.devices.processor import EmulatedDevice, HostDevice
from atomtrain.errors import ConfigError
from atomtrain.planning.catalogue import Gpu, gpu_reported_as, machine_for
from atomtrain.planning.cost.segments import SavedTensors
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.shape import Activation, Shape, training_visits

_STEALING_COPY_S = 0.01
_ENOUGH_BYTES = 1 << 30
_TRIED_PARAMETERS = 4 << 20
"""Of the optimizer that is tried where nothing shall be measured: 64 MiB."""
_NO_TIME_PER_S = 1e18
"""Rate of what takes no time: copies that nobody makes, updates that compute itself makes."""
_TRIAL_LAYERS = 6
_TRIAL_WIDTH = 16
_TRIAL_MICRO_BATCHES = 4
_TRIAL_WARMUP_STEPS = 2
_TRIAL_STEPS = 9
_TRIAL_MEMORY_BYTES = 1 << 20
_TRIAL_LINK_BYTES_PER_S = 1e11


def measure_machine(
    device: Device, overhead: MeasureOverhead, folder: Path | None = None
) -> Machine:
    """Return this machine's rates, measured; takes a second or two.

    Args:
        device: Idle, with a quarter of its budget free.
        overhead: Called for the emulated device.
        folder: Whose disk is measured; `None` is that of temporary files.
    """
    if isinstance(device, HostDevice):
        return _one_memory(device, update_parameters_per_s(), folder)
    with _quiet(device) as probe:
        pinned = link_rates(probe)
        emulated = isinstance(probe, EmulatedDevice)
        # On a busy machine small copies may take as long as large ones, which seem faster by that.
        fastest = probe.link_bytes_per_s if isinstance(probe, EmulatedDevice) else math.inf
        # Ordinary memory is all that the emulated device knows.
        pageable = None if emulated else link_rates(probe, pinned=False)
        lost = _stolen(probe, pinned.load_bytes_per_s) if emulated else Stolen(0.0, 0.0)
        there = device_update_parameters_per_s(probe)
    # A GPU computes while its host hands over.
    spent = overhead() if emulated else Overhead(0.0, 0.0)
    storage = storage_rates(folder or Path(tempfile.gettempdir()))
    return Machine(
        name=device.name,
        load_bytes_per_s=min(pinned.load_bytes_per_s, fastest),
        unload_bytes_per_s=min(pinned.unload_bytes_per_s, fastest),
        update_parameters_per_s=update_parameters_per_s(),
        device_memory_bytes=budget_bytes(device),
        host_memory_bytes=host_memory_bytes(),
        both_ways_share=pinned.both_ways_share,
        compute_s_per_copied_byte=lost.s_per_copied_byte,
        compute_s_per_update=lost.s_per_update,
        device_update_parameters_per_s=there,
        compute_s_per_offloaded_storage=spent.offloaded_storage_s,
        visit_s=spent.visit_s,
        copy_s=pinned.copy_s,
        load_pageable_bytes_per_s=pageable.load_bytes_per_s if pageable else None,
        unload_pageable_bytes_per_s=pageable.unload_bytes_per_s if pageable else None,
        host_copy_bytes_per_s=host_copy_bytes_per_s(),
        storage_read_bytes_per_s=storage.read_bytes_per_s if storage else None,
        storage_write_bytes_per_s=storage.write_bytes_per_s if storage else None,
        storage_both_ways_share=storage.both_ways_share if storage else 1.0,
    )


def assumed_machine(device: Device) -> Machine:
    """Return this machine's rates without a profile: a GPU's from the catalogue.

    The emulated device's link is what it was told to be; its host optimizer is tried once in a
    process.

    Raises:
        ConfigError: the GPU is not in the catalogue.
    """
    if isinstance(device, HostDevice):
        return _one_memory(device, _tried_update_rate(torch.get_num_threads()), None)
    if isinstance(device, EmulatedDevice):
        return Machine(
            name=device.name,
            load_bytes_per_s=device.link_bytes_per_s,
            unload_bytes_per_s=device.link_bytes_per_s,
            update_parameters_per_s=_tried_update_rate(torch.get_num_threads()),
            device_memory_bytes=budget_bytes(device),
            host_memory_bytes=host_memory_bytes(),
        )
    return machine_for(
        catalogue_gpu(device), host_memory_bytes(), device_memory_bytes=budget_bytes(device)
    )


@functools.cache
def _tried_update_rate(_threads: int) -> float:
    """Return roughly what the host's optimizer does with so many threads: where caches are large,
    some of what it goes through comes from them."""
    return update_parameters_per_s(_TRIED_PARAMETERS)


def catalogue_gpu(device: Device) -> Gpu:
    """Return the catalogue's entry for a device.

    Raises:
        ConfigError: the GPU is not in the catalogue.
    """
    card = gpu_reported_as(device.name)
    if card is None:
        raise ConfigError(
            f"the GPU {device.name!r} is not in the catalogue"
            f"{', which has whole cards, no MIG slices' if ' MIG ' in device.name else ''}, so its "
            "rates must be measured; leave out --no-profile"
        )
    return card


def host_memory_bytes() -> int:
    """Return what a model may take of this host's memory now, in bytes."""
    return host_memory().usable_bytes


def budget_bytes(*devices: Device) -> int:
    """Return what plans may use of a device's memory; of several that share a model, the least."""
    return min(max(1, device.memory_bytes - device.reserved_bytes) for device in devices)


@contextmanager
def _quiet(device: Device) -> Iterator[Device]:
    """Give a device whose streams run nothing but the measurements.

    Tests slow the streams of emulated devices on purpose, and give them less memory than a
    measurement takes.
    """
    if not isinstance(device, EmulatedDevice):
        yield device
        return
    twin = EmulatedDevice(_ENOUGH_BYTES, device.link_bytes_per_s)
    try:
        yield twin
    finally:
        twin.close()


def _one_memory(device: HostDevice, parameters_per_s: float, folder: Path | None) -> Machine:
    """Return a host that is its own device; its disk is measured if a folder is given."""
    storage = None if folder is None else storage_rates(folder)
    return Machine(
        name=device.name,
        load_bytes_per_s=_NO_TIME_PER_S,
        unload_bytes_per_s=_NO_TIME_PER_S,
        update_parameters_per_s=_NO_TIME_PER_S,
        compute_s_per_update=1 / parameters_per_s,  # they share their cores
        device_memory_bytes=budget_bytes(device),
        host_memory_bytes=host_memory_bytes(),
        host_copy_bytes_per_s=None if folder is None else host_copy_bytes_per_s(),
        storage_read_bytes_per_s=storage.read_bytes_per_s if storage else None,
        storage_write_bytes_per_s=storage.write_bytes_per_s if storage else None,
    )


def _stolen(device: Device, link_bytes_per_s: float) -> Stolen:
    matrix = torch.ones(384, 384)

    def work() -> None:
        torch.mm(matrix, matrix)

    copy_bytes = int(min(8 << 20, max(1 << 12, _STEALING_COPY_S * link_bytes_per_s)))
    return stolen(device, work, copy_bytes)


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
    model = nn.Sequential(*(_layer() for _ in range(_TRIAL_LAYERS)))
    example = torch.ones(_TRIAL_WIDTH, _TRIAL_WIDTH)
    traced = chain_of(model, example, torch.sum)
    inputs = traced.bind(example)
    costs = layer_costs(traced.chain, inputs)
    with swap(
        model,
        example,
        optimizer=torch.optim.AdamW,
        device=EmulatedDevice(_TRIAL_MEMORY_BYTES, _TRIAL_LINK_BYTES_PER_S),
        loss=torch.sum,
        micro_batches=_TRIAL_MICRO_BATCHES,
        segments=_TRIAL_LAYERS,
        activations=activation,
        optimizer_on_device=False,
        profile=False,
    ) as engine:
        seconds = []
        for _ in range(_TRIAL_WARMUP_STEPS + _TRIAL_STEPS):
            started_s = time.thread_time()
            engine.step([example] * _TRIAL_MICRO_BATCHES)
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
        step_s=statistics.median(seconds[_TRIAL_WARMUP_STEPS:]) / _TRIAL_MICRO_BATCHES,
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
        return nn.Linear(_TRIAL_WIDTH, _TRIAL_WIDTH)

    norms = nn.LayerNorm(_TRIAL_WIDTH), nn.LayerNorm(_TRIAL_WIDTH)
    return nn.Sequential(norms[0], product(), product(), norms[1], product(), nn.GELU(), product())
