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
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.memory import Boundary, Choice, MemoryModel, greedy_bounds
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.schedule import training_visits
from atomtrain.planning.timeline import SegmentTime, StepTime, predict
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
    candidates: list[_Candidate] = []
    least_bytes: int | None = None
    for choice in _choices(chain, layout, request):
        device_bytes = memory.device_bytes(choice)
        least_bytes = min(device_bytes, least_bytes or device_bytes)
        if device_bytes <= machine.device_memory_bytes:
            visits = training_visits(choice.segments, choice.slots, choice.gradient_buffers)
            segment_times = _segment_times(choice, costs, times, machine, memory, layout)
            time = predict(visits, segment_times)
            candidates.append(_Candidate(choice, device_bytes, time))
    if not candidates:
        raise _does_not_fit(chain, memory, machine, least_bytes or 0, request)
    choice, device_bytes, time = _best(candidates)
    host_bytes = memory.host_bytes(choice)
    if host_bytes > machine.host_memory_bytes:
        raise PlanError(
            f"training this model takes {format_bytes(host_bytes)} of host memory, "
            f"{format_bytes(machine.host_memory_bytes)} are there; choose a smaller model"
        )
    segments = zip(choice.bounds, choice.bounds[1:], strict=False)
    return Plan(
        bounds=choice.bounds,
        slots=choice.slots,
        gradient_buffers=choice.gradient_buffers,
        boundary=choice.boundary,
        micro_batches=request.micro_batches,
        slot_bytes=max(layout.segment_bytes(*segment) for segment in segments),
        device_peak_bytes=device_bytes,
        device_memory_bytes=machine.device_memory_bytes,
        host_bytes=host_bytes,
        bound=time.bound,
        **time._asdict(),
    )


class _Candidate(NamedTuple):
    """A choice that fits, and what it costs."""

    choice: Choice
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
        memory.device_bytes(choice) <= device_memory_bytes
        for choice in _choices(chain, layout, Request(micro_batches=micro_batches))
        if choice.boundary == "device"
    )


def _choices(chain: Chain, layout: Layout, request: Request) -> Iterator[Choice]:
    for bounds in _partitions(chain, layout):
        segments = len(bounds) - 1
        if request.segments is not None and segments != request.segments:
            continue
        most = min(segments, 3)
        slots = {min(request.slots, segments)} if request.slots else {min(2, most), most}
        wanted = request.gradient_buffers
        buffers = {min(wanted, segments)} if wanted else {1, min(2, segments)}
        for n_slots, n_buffers, boundary in itertools.product(slots, buffers, _BOUNDARIES):
            yield Choice(bounds, n_slots, n_buffers, boundary)


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


def _segment_times(
    choice: Choice,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    memory: MemoryModel,
    layout: Layout,
) -> list[SegmentTime]:
    result = []
    n_micro_batches = memory.micro_batches
    for start, stop in zip(choice.bounds, choice.bounds[1:], strict=False):
        layers = costs.layers[start:stop]
        n_bytes = layout.segment_bytes(start, stop)
        saved = n_micro_batches * memory.saved_bytes(start)
        # Through the host, what stands at a cut crosses once more in each direction and phase.
        passes = 1 if choice.boundary == "device" else 2
        result.append(
            SegmentTime(
                forward_s=n_micro_batches * sum(times[c.kind].forward_s for c in layers),
                backward_s=n_micro_batches * sum(times[c.kind].backward_s for c in layers),
                load_s=n_bytes / machine.load_bytes_per_s,
                unload_s=n_bytes / machine.unload_bytes_per_s,
                update_s=sum(c.parameters for c in layers) / machine.update_parameters_per_s,
                save_s=saved / machine.unload_bytes_per_s,
                fetch_s=passes * saved / machine.load_bytes_per_s,
            )
        )
    return result


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
