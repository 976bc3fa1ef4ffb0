"""Where a model would train: a GPU of the catalogue, or this machine as it is measured."""

from __future__ import annotations

from typing import NamedTuple

from atomtrain.analysis.profile import estimated_times, flops_per_s
from atomtrain.planning.catalogue import MATMUL_SHARE, Gpu, estimate_times
from atomtrain.planning.machine import Machine
from atomtrain.planning.prospect import Compute
from atomtrain.swapping.devices import open_device
from atomtrain.swapping.machines import measure_machine


class Place(NamedTuple):
    """Link, host and budgets, and whose compute counts: one of the last two is given."""

    machine: Machine
    card: Gpu | None = None
    local: Compute | None = None


def this_place(device_memory_bytes: int | None) -> Place:
    """Measure this machine: its link, host optimizer and matrix products; under a second or two.

    Raises:
        ConfigError: the budget is more than the GPU has.
    """
    device = open_device("auto", device_memory_bytes)
    try:
        machine = measure_machine(device)
        rate = flops_per_s(device.torch_device, device.synchronize)
    finally:
        device.close()

    compute = Compute(lambda costs: estimated_times(costs, rate), rate, rate)
    return Place(machine, local=compute)


def compute_of(card: Gpu, dtype: str) -> Compute:
    """Return how fast a GPU of the catalogue computes; `dtype` is that of matrix products."""
    peak = card.peak_flops_per_s(dtype)
    return Compute(
        lambda costs: estimate_times(costs, card, dtype), MATMUL_SHARE[dtype] * peak, peak
    )
