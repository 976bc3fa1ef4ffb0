"""Searches for the plan with the least predicted step time among those that fit.

Objective and constraints are in `docs/architecture.md`. The candidates are all partitions that
fill segments up to some cap (a cap for each size that a run of layers can have), times slots,
gradient buffers and where the values at the cuts wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.costing import Costing
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.memory import MemoryModel
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.shape import Activation, Boundary, Shape
from atomtrain.planning.timeline import StepTime
from atomtrain.units import format_bytes

_EQUAL = 0.01
"""Predicted times that differ by less are equal: profiles are no better than that."""
_BOUNDARIES: tuple[Boundary, ...] = ("device", "host")


def make_plan(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
) -> Plan:
    """Return the fastest plan that fits the machine.

    Args:
        chain: The model.
        costs: Bytes of its layers for one micro-batch.
        times: Seconds of each kind of layer for one micro-batch.
        machine: Rates and budgets.
        request: What is fixed beforehand.

    Raises:
        PlanError: nothing fits; names the layer and the least budget that would do.
    """
    layout = Layout(chain)
    memory = MemoryModel(chain, costs, layout, request.micro_batches)
    costing = Costing(chain, costs, times, machine, layout, request.micro_batches)
    candidates: list[_Candidate] = []
    least_bytes: int | None = None
    for shape in _shapes(chain, layout, request):
        device_bytes = memory.device_bytes(shape)
        least_bytes = min(device_bytes, least_bytes or device_bytes)
        if device_bytes <= machine.device_memory_bytes:
            candidates.append(_Candidate(shape, device_bytes, costing.step(shape)))
    if not candidates:
        raise _does_not_fit(chain, memory, machine, least_bytes or 0, request)
    plan = plan_of(_best(candidates).shape, memory, costing, machine)
    if plan.host_bytes > machine.host_memory_bytes:
        raise PlanError(
            f"training this model takes {format_bytes(plan.host_bytes)} of host memory, "
            f"{format_bytes(machine.host_memory_bytes)} are there; choose a smaller model"
        )
    return plan


def plan_of(shape: Shape, memory: MemoryModel, costing: Costing, machine: Machine) -> Plan:
    """Return the plan of a shape with its predicted time and memory, whether or not it fits."""
    time = costing.step(shape)
    return Plan(
        **shape._asdict(),
        **memory.sizes(shape)._asdict(),
        micro_batches=memory.micro_batches,
        device_peak_bytes=memory.device_bytes(shape),
        device_memory_bytes=machine.device_memory_bytes,
        host_bytes=memory.host_bytes(shape),
        bound=time.bound,
        **time._asdict(),
    )


class _Candidate(NamedTuple):
    """A choice that fits, and what it costs."""

    shape: Shape
    device_bytes: int
    time: StepTime


def _best(candidates: Sequence[_Candidate]) -> _Candidate:
    """Return the fastest; among equally fast ones that with the least traffic, then memory.

    Traffic that is hidden still takes memory bandwidth from the host.
    """
    least_s = min(candidate.time.step_s for candidate in candidates)
    equal = [c for c in candidates if c.time.step_s <= (1 + _EQUAL) * least_s]
    return min(equal, key=lambda c: (c.time.load_s + c.time.unload_s, c.device_bytes))


def fits(chain: Chain, costs: ChainCosts, device_memory_bytes: int, micro_batches: int) -> bool:
    """Return whether some plan fits the device that keeps values between segments there."""
    layout = Layout(chain)
    memory = MemoryModel(chain, costs, layout, micro_batches)
    return any(
        memory.device_bytes(shape) <= device_memory_bytes
        for shape in _shapes(chain, layout, Request(micro_batches=micro_batches))
        if shape.boundary == "device"
    )


def _shapes(chain: Chain, layout: Layout, request: Request) -> Iterator[Shape]:
    for bounds in _partitions(chain, layout):
        segments = len(bounds) - 1
        if request.segments is not None and segments != request.segments:
            continue
        most = min(segments, 3)
        slots = {min(request.slots, segments)} if request.slots else {min(2, most), most}
        wanted = request.gradient_buffers
        buffers = {min(wanted, segments)} if wanted else {1, min(2, segments)}
        for n_slots, n_buffers, boundary in itertools.product(slots, buffers, _BOUNDARIES):
            recompute: Activation = "recompute"
            yield Shape(
                bounds[:-1],
                bounds,
                n_slots,
                n_buffers,
                boundary,
                activations=(recompute,) * segments,
            )


def _partitions(chain: Chain, layout: Layout) -> list[tuple[int, ...]]:
    """Return the candidate partitions, finest first."""
    sizes = [stop - start for start, stop in layout.layers]
    for shared in layout.shared:
        for user in shared.users:
            sizes[user] += shared.stop_bytes - shared.start_bytes
    count = len(chain.layers)
    caps = {0}
    for start in range(count):
        caps.update(itertools.accumulate(sizes[start:]))
    partitions = {greedy_bounds(sizes, cap) for cap in caps}
    partitions.update(_even_bounds(count, segments) for segments in range(1, count + 1))
    return sorted(partitions, key=lambda bounds: (-len(bounds), bounds))


def _even_bounds(layers: int, segments: int) -> tuple[int, ...]:
    """Return a partition into `segments` of nearly equal numbers of layers."""
    return tuple(index * layers // segments for index in range(segments + 1))


def greedy_bounds(sizes: Sequence[int], cap: int) -> tuple[int, ...]:
    """Return the partition that fills each segment, from the last layer down, up to `cap`.

    The first segment gets what is left over: its load and update are the ones that no compute can
    hide, so it should be the small one.
    """
    bounds = [len(sizes)]
    filled = 0
    for index in reversed(range(len(sizes))):
        if filled and filled + sizes[index] > cap:
            bounds.append(index + 1)
            filled = 0
        filled += sizes[index]
    return (0, *reversed(bounds))


def _does_not_fit(
    chain: Chain, memory: MemoryModel, machine: Machine, least_bytes: int, request: Request
) -> PlanError:
    if least_bytes == 0:
        return PlanError(
            f"no partition has {request.segments} segments; this model's {len(chain.layers)} "
            f"layers allow 1 to {len(chain.layers)}"
        )
    needs = [memory.least_layer_bytes(index) for index in range(len(chain.layers))]
    worst = max(range(len(needs)), key=lambda index: needs[index])
    return PlanError(
        f"no plan fits the device budget of {format_bytes(machine.device_memory_bytes)}: layer "
        f"{chain.layers[worst].name!r} alone needs {format_bytes(needs[worst])} with this "
        f"micro-batch; raise --device-memory to at least {_rounded_up(least_bytes)}, or use "
        "smaller micro-batches"
    )


def _rounded_up(n_bytes: int) -> str:
    """Return a size in whole MiB (or KiB when small) that is not below `n_bytes`."""
    unit, name = (2**20, "MiB") if n_bytes >= 8 * 2**20 else (2**10, "KiB")
    return f"{-(-n_bytes // unit)}{name}"
