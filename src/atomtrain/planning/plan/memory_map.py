"""Where a plan's memory goes, region by region: host, disk, and the device at its peak."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.layout import Layout, host_gradients
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.updating import further_gradients_bytes


class Region(NamedTuple):
    place: Literal["host", "disk", "device"]
    kind: str
    """`parameters`, `gradients`, `optimizer` or `waiting` on the host, the first and the third also
    on a disk; `slot`, `gradient`, `resident`, `work` or `free` on the device."""
    label: str
    """Which segment, slot or block it holds, for people."""
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return self._asdict()


def memory_map(
    chain: Chain, plan: Plan, optimizer_state_bytes: int, devices: int = 1
) -> list[Region]:
    """Return all regions; those of each place add up to what the plan says of it.

    Args:
        chain: The model's layers.
        plan: Made for it.
        optimizer_state_bytes: Of all parameters, in host memory.
        devices: How many share the host; the regions on the device are those of each of them.
    """
    layout = Layout(chain)
    host = _host(layout, plan, optimizer_state_bytes, devices)
    return [*host, *_device(chain, layout, plan)]


def _host(layout: Layout, plan: Plan, optimizer_state_bytes: int, devices: int) -> Iterator[Region]:
    further = further_gradients_bytes(layout, devices)
    held = optimizer_state_bytes + further
    if "parameters" not in plan.on_disk:
        held += layout.total_bytes
        for label, size in _parts(layout, plan):
            yield Region("host", "parameters", label, size)
    each = layout.gradient_factor
    trained = list(_parts(layout.gradients, plan))
    if plan.spends:
        rooms = host_gradients(layout, plan.shape, spends=True).total_bytes
        held += rooms
        yield Region("host", "gradients", "until their own update", rooms)
    else:
        held += each * layout.gradients.total_bytes
        for label, size in trained:
            yield Region("host", "gradients", label, each * size)
    for number in range(1, devices):
        size = further // (devices - 1)
        yield Region("host", "gradients", f"of device {number}, until they are added", size)
    total = max(1, layout.gradients.total_bytes)
    for label, size in trained:
        yield Region("host", "optimizer", label, optimizer_state_bytes * size // total)
    if plan.on_disk:
        stored = layout.total_bytes if "parameters" in plan.on_disk else 0
        if stored:
            parts = _parts(layout, plan)
            yield from (Region("disk", "parameters", label, size) for label, size in parts)
        yield Region("disk", "optimizer", "moments, masters", max(0, plan.disk_bytes - stored))
    waiting = max(0, plan.host_bytes - held)
    yield Region("host", "waiting", "values between segments, staging, process", waiting)


def _parts(layout: Layout, plan: Plan) -> Iterator[tuple[str, int]]:
    bounds = plan.backward_bounds
    if plan.host_layers:
        yield (
            f"layers on the host: {_layers(0, plan.host_layers)}",
            _own(layout, 0, plan.host_layers),
        )
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        yield f"segment {number}: {_layers(start, stop)}", _own(layout, start, stop)
    for shared in layout.shared:
        users = ", ".join(map(str, shared.users))
        yield f"shared by layers {users}", shared.stop_bytes - shared.start_bytes


def _own(layout: Layout, start: int, stop: int) -> int:
    return sum(layout.block_bytes(block) for block in range(start, stop))


def _device(chain: Chain, layout: Layout, plan: Plan) -> Iterator[Region]:
    regions = [
        *(Region("device", "slot", f"slot {i}", plan.slot_bytes) for i in range(plan.slots)),
        *(
            Region("device", "gradient", f"gradient buffer {i}", plan.gradient_bytes)
            for i in range(plan.gradient_buffers)
        ),
    ]
    for block in plan.resident_blocks:
        name = (
            chain.layers[block].name
            if block < len(chain.layers)
            else f"weight shared by layers {', '.join(map(str, layout.users(block)))}"
        )
        size = layout.block_arena_bytes(block)
        regions.append(Region("device", "resident", f"{name} with its gradient", size))
    yield from regions
    held = sum(region.bytes for region in regions)
    work = max(0, plan.device_peak_bytes - held)
    yield Region("device", "work", "values at cuts, workspace, buffers", work)
    free = max(0, plan.device_memory_bytes - max(plan.device_peak_bytes, held))
    yield Region("device", "free", "free", free)


def _layers(start: int, stop: int) -> str:
    return f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
