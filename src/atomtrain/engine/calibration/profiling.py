"""What a plan is made from: rates of the machine and times of the layers, measured or assumed.

Times that were measured beside other programs are too long, and so is what is predicted from them.
So what others took of the cores that were needed is noted: on a large host they may be busy without
being in the way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import (
    LayerTime,
    compute_dtype,
    estimated_times,
    flops_per_s,
    layer_times,
    measured_bytes,
)
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.calibration.machines import (
    MeasureOverhead,
    assumed_machine,
    budget_bytes,
    catalogue_gpu,
    host_memory_bytes,
    measure_machine,
)
from atomtrain.engine.calibration.offload_times import with_offloading
from atomtrain.engine.calibration.profile_cache import (
    ProfileCache,
    layer_key,
    machine_key,
    profile_folder,
)
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import DeviceMemoryError, PlanError
from atomtrain.planning.catalogue import estimate_times
from atomtrain.planning.plan.machine import Machine
from atomtrain.progress import Progress
from atomtrain.topology import allowed_cores
from atomtrain.units import format_bytes

CROWDED_SHARE = 0.15
"""Measurements beside others that had more than this are not relied on."""
_LEAST_S = 0.1
"""The kernel counts in hundredths of a second: shorter times say nothing."""
_HELPERS = 2
"""Copies and updates run beside compute."""
_UNITS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_MIB = 1 << 20
_MACHINE_BYTES = 64 * _MIB
"""Of the updates and copies by which a machine is measured."""
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of a line of /proc/stat: user, nice, system, interrupts (two kinds), stolen by the hypervisor."""


class Moment(NamedTuple):
    """Clocks at a moment."""

    time_s: float
    busy_s: float
    """For how long the cores that this process may use have been busy, all together."""
    own_s: float
    """Processor time of this process, all threads."""


class Watch:
    """Watches the processor from its making on."""

    def __init__(self) -> None:
        self._begun = _now()

    def crowded_share(self) -> float:
        """Return what others had of the needed cores since then; 0 where it cannot be known."""
        ended = _now()
        if self._begun is None or ended is None:
            return 0.0
        cores = len(allowed_cores())
        return crowded_share(self._begun, ended, cores, torch.get_num_threads())


def crowded_share(begun: Moment, ended: Moment, cores: int, threads: int) -> float:
    """Return what others had of the cores needed between two moments.

    Args:
        begun: The first moment.
        ended: The second; 0 is returned if it follows too closely.
        cores: That this process may use.
        threads: With which it computes.
    """
    wall_s = ended.time_s - begun.time_s
    if wall_s < _LEAST_S:
        return 0.0
    others = (ended.busy_s - begun.busy_s - (ended.own_s - begun.own_s)) / wall_s
    needed = min(cores, threads + _HELPERS)
    # Cores that nobody needs are left to others first.
    in_the_way = min(others, others + needed - cores)
    return min(1.0, max(0.0, in_the_way / needed))


def crowded_now(watched_s: float = 1.5 * _LEAST_S) -> float:
    """Return what others have of the cores at this moment; waits so long."""
    watch = Watch()
    time.sleep(watched_s)
    return watch.crowded_share()


def crowding_warning(share: float) -> str | None:
    """Return what to tell of a profile that was taken so, or `None` if nothing is wrong with it."""
    if share <= CROWDED_SHARE:
        return None
    return (
        f"this machine was measured while other programs had {share:.0%} of its processor, so "
        "predicted times are too long; it is measured again once they are idle, or with "
        "--profile-again"
    )


def _now() -> Moment | None:
    """Return the clocks; `None` where the kernel does not tell."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        mine = {f"cpu{core}" for core in allowed_cores()}
        counts = [line.split() for line in lines if line.split(" ", 1)[0] in mine]
        ticks = sum(int(found[1 + field]) for found in counts for field in _BUSY_FIELDS)
    except (OSError, ValueError, IndexError):
        return None
    return Moment(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class Profile(NamedTuple):
    """A machine, and the seconds of each kind of layer on its device for one micro-batch."""

    machine: Machine
    times: Mapping[str, LayerTime]
    crowded_share: float = 0.0
    """What other programs had of the processor while this was measured."""


def take_profile(
    device: Device,
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    overhead: MeasureOverhead,
    *,
    measure: bool | Literal["again"] = True,
    folder: Path | None = None,
) -> Profile:
    """Return what a plan needs to know; a few seconds the first time, then from the cache.

    What was measured on a crowded processor is measured again as soon as it is less crowded, and
    what steps were predicted from wrongly, the next time (`engine/calibration/profile_cache.py`).

    Args:
        device: Idle, and nothing of the model on it.
        chain: With real parameters; they are not changed.
        costs: Of the chain.
        inputs: One micro-batch, by the chain's input names.
        overhead: Measures what compute spends beside layers, for the emulated device.
        measure: `"again"` forgets what the cache has. If `False`, a GPU's figures come from the
            catalogue, and the emulated device's times from FLOPs and the rate of a matrix product.
        folder: Of the cache; `None` is the user's.

    Raises:
        AnalysisError: a layer's time is not a number; names the layer.
        ConfigError: nothing shall be measured, and the GPU is not in the catalogue.
        PlanError: the device's memory is too little to measure in; says what would do.
    """
    if not measure:
        return Profile(assumed_machine(device), _assumed_times(device, chain, costs))
    folder = folder or profile_folder()
    cache = ProfileCache(folder, machine_key(device))
    keys = {
        cost.kind: layer_key(layer, cost, costs.values)
        for layer, cost in zip(chain.layers, costs.layers, strict=True)
    }
    again = measure == "again"
    known = _complete(cache, keys) and not cache.doubted
    if again or not known or _less_crowded(cache, keys.values()):
        with cache.turn(), Progress("measuring the machine and the model's layers"):
            _forget(cache, keys.values(), again=again)
            _measure_machine(cache, device, overhead)
            _measure(cache, device, chain, costs, inputs, keys)
            cache.save()
    machine = cache.machine(budget_bytes(device), host_memory_bytes())
    assert machine is not None
    times = {kind: time for kind, key in keys.items() if (time := cache.time(key)) is not None}
    return Profile(machine, times, cache.crowded_share(keys.values()))


def profiled_machine(
    device: Device, overhead: MeasureOverhead, folder: Path | None = None, *, again: bool = False
) -> Profile:
    """Return a machine's rates, without times of layers.

    They are measured in a second or two the first time, then they come from the cache.

    Args:
        device: Idle, with a quarter of its budget free.
        overhead: As of `take_profile`.
        folder: Of the cache; `None` is the user's.
        again: Forget what the cache has, times of layers too.
    """
    cache = ProfileCache(folder or profile_folder(), machine_key(device))
    if again or not cache.known or cache.doubted or _less_crowded(cache, ()):
        with cache.turn():
            _forget(cache, (), again=again)
            _measure_machine(cache, device, overhead)
            cache.save()
    machine = cache.machine(budget_bytes(device), host_memory_bytes())
    assert machine is not None
    return Profile(machine, {}, cache.crowded_share(()))


def _forget(cache: ProfileCache, keys: Iterable[str], *, again: bool) -> None:
    """Read what others may have measured meanwhile, and forget what is to be measured again."""
    cache.reload()
    if again or cache.doubted:
        cache.forget()
    elif _less_crowded(cache, keys):
        cache.forget(CROWDED_SHARE)


def _less_crowded(cache: ProfileCache, keys: Iterable[str]) -> bool:
    """Return whether the processor was crowded when this was measured, and is less so now."""
    then = cache.crowded_share(keys)
    return then > CROWDED_SHARE and crowded_now() < then / 2


def _complete(cache: ProfileCache, keys: Mapping[str, str]) -> bool:
    return cache.machine(1, 1) is not None and all(cache.time(key) for key in keys.values())


def _measure(
    cache: ProfileCache,
    device: Device,
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    keys: Mapping[str, str],
) -> None:
    """Measure the times of layers that the cache lacks."""
    missing = [kind for kind, key in keys.items() if cache.time(key) is None]
    if missing:
        watch = Watch()
        for kind, layer_time in measured_times(device, chain, costs, inputs, missing).items():
            cache.put_time(keys[kind], layer_time, watch.crowded_share())
    device.trim()


def measured_times(
    device: Device,
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    kinds: Sequence[str] | None = None,
) -> dict[str, LayerTime]:
    """Return the seconds of kinds of layers, measured now.

    Args:
        device: Idle, and nothing of the model on it, or what is there leaves room for a layer.
        chain: With real parameters; they are not changed.
        costs: Of the chain.
        inputs: One micro-batch, by the chain's input names.
        kinds: Which to measure, at least one; `None` is all.

    Raises:
        PlanError: they do not fit; says what would do.
    """
    read_bytes = {name: 2 * spec.n_bytes for name, spec in costs.values.items()}  # and gradients
    needed = {
        layer.name: measured_bytes(cost) + sum(read_bytes[name] for name in layer.reads)
        for layer, cost in zip(chain.layers, costs.layers, strict=True)
        if kinds is None or cost.kind in kinds
    }
    largest = max(needed, key=needed.__getitem__)
    with within_budget(device, f"layer {largest!r}", needed[largest]):
        times = layer_times(
            chain,
            costs,
            inputs,
            device.torch_device,
            device.synchronize,
            computing=_computing(device),
            kinds=kinds,
        )
    # A GPU computes while its host hands over.
    return with_offloading(times, chain, costs, inputs) if _emulated(device) else times


def _measure_machine(cache: ProfileCache, device: Device, overhead: MeasureOverhead) -> None:
    """Measure the machine's rates if the cache lacks them."""
    if cache.machine(1, 1) is None:
        watch = Watch()
        with within_budget(device, "its link and optimizer", _MACHINE_BYTES):
            machine = measure_machine(device, overhead, cache.path.parent)
        cache.put_machine(machine, watch.crowded_share())


@contextmanager
def within_budget(device: Device, what: str, needed_bytes: int) -> Iterator[None]:
    """Say what would do if the device's memory is too little for a measurement."""
    try:
        yield
    except DeviceMemoryError as error:
        budget_bytes = device.memory_bytes
        # More than it has, whatever others take of the card or lies between blocks.
        least = max(needed_bytes + device.reserved_bytes, budget_bytes + budget_bytes // 4)
        raise PlanError(
            f"{device.name} cannot be measured within --device-memory "
            f"{format_bytes(budget_bytes)}: {what} takes {format_bytes(needed_bytes)}, beside "
            f"{format_bytes(device.reserved_bytes)} of libraries; raise it to "
            f"{-(-least // _MIB)}MiB, end what else uses the card, or use smaller micro-batches"
        ) from error


def _emulated(device: Device) -> bool:
    return isinstance(device, EmulatedDevice)


def _computing(device: Device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context in which layers run in training.

    The emulated device's accounting is part of what its layers take. Its budget is not enforced
    here: a layer that exceeds it gets a `PlanError`, which says what would do.
    """
    if _emulated(device):
        return StorageTracker
    return device.computing


def _assumed_times(device: Device, chain: Chain, costs: ChainCosts) -> dict[str, LayerTime]:
    dtype = compute_dtype(chain)
    if device.torch_device.type == "cpu":
        return estimated_times(costs, flops_per_s(device.torch_device, device.synchronize, dtype))
    card = catalogue_gpu(device)
    exact = torch.get_float32_matmul_precision() == "highest"
    name = _UNITS.get(dtype, "fp32" if exact else "tf32")
    return estimate_times(costs, card, name if name in card.flops_per_s else "fp32")
