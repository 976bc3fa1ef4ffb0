"""The plan: a frozen answer to "how is this model trained on this machine?", and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import PlanError
from atomtrain.planning.plan.disk import DiskRequest, OnDisk
from atomtrain.planning.plan.layout import Layout, host_gradients
from atomtrain.planning.plan.shape import ACTIVATIONS, Activation, Boundary, Shape
from atomtrain.planning.plan.updating import UpdateModel, further_gradients_bytes
from atomtrain.units import counted, format_bytes, format_seconds

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Request:
    micro_batches: int
    """A, forward calls a step, at least 1."""
    segments: int | None = None
    """Number of backward segments, or `None` for the planner's choice."""
    slots: int | None = None
    """Device slots, or `None` for the planner's choice of one or two."""
    gradient_buffers: int | None = None
    """Gradient buffers, or `None` for the planner's choice of one or two."""
    boundary: Boundary | None = None
    """Where values at a cut wait, or `None` for the planner's choice."""
    resident: tuple[int, ...] | None = None
    """Resident blocks, or `None` for the planner's choice."""
    activations: Activation | None = None
    """What all backward segments below the turn do with what forward saves, if they can (others
    recompute), or `None` for the planner's choice for each of them."""
    offload: bool = True
    """Whether the planner may let segments offload what they save to the host."""
    host_layers: int | None = None
    """How many leading layers run on the host (0, or as many as only look up), or `None` for the
    planner's choice."""
    device_blocks: tuple[int, ...] | None = None
    """Resident blocks whose optimizer runs on the device, or `None` for the planner's choice."""
    updates: UpdateModel | None = None
    """What the optimizer takes; `None`: AdamW with two moments of the parameters' own type."""
    disk: DiskRequest | None = None
    """What may lie on disk; `None`: nothing."""
    clips: bool = False
    """Whether no update begins before the norm of all gradients is known."""
    devices: int = 1
    """How many devices of the host run the plan at once; `updates` are what they share."""
    spends: bool = False
    """Whether gradients wait on the host for their own update only, in a few staging buffers."""

    def __post_init__(self) -> None:
        for name in ("micro_batches", "segments", "slots", "gradient_buffers", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, not {value}")
        if self.spends and (self.clips or self.devices > 1):
            raise PlanError(
                "gradients can only be spent at once where no update waits for other gradients; "
                "leave out clipping and loss scaling, and give one device"
            )
        if self.activations not in (None, *ACTIVATIONS):
            raise PlanError(
                f"activations must be {', '.join(ACTIVATIONS)} or None, not {self.activations!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A shape (what its fields mean, `Shape` says), with the cost that was predicted for it."""

    forward_bounds: tuple[int, ...]
    backward_bounds: tuple[int, ...]
    resident_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    remakes: bool = True
    spends: bool = False
    """Whether gradients wait on the host for their own update only (`layout.py`)."""
    host_layers: int
    activations: tuple[Activation, ...]
    slots: int
    slot_bytes: int
    """The largest segment of both partitions without its resident blocks."""
    gradient_buffers: int
    gradient_bytes: int
    """Of a gradient buffer: as large as a slot."""
    boundary: Boundary
    micro_batches: int
    device_peak_bytes: int
    """Predicted; never below the measured peak."""
    device_memory_bytes: int
    """The budget."""
    host_bytes: int
    """Parameters, gradients, optimizer state and values kept for backward. State on the device
    counts too: it passes through the host when it is saved."""
    on_disk: OnDisk
    """Kinds of state that are on disk, not in `host_bytes`."""
    disk_bytes: int
    """Of the disk that they take."""
    disk_written_bytes: int
    """Written a step."""
    step_s: float
    """Predicted, from step to step."""
    compute_s: float
    """Predicted busy time of the device in a step."""
    load_s: float
    unload_s: float
    update_s: float
    disk_s: float
    """Predicted time in which the disk is busy in a step; 0 without one."""
    bound: str
    """The resource that is busiest."""

    @property
    def shape(self) -> Shape:
        return Shape(*(getattr(self, name) for name in Shape._fields))

    @property
    def segments(self) -> int:
        return len(self.backward_bounds) - 1

    @property
    def recomputed(self) -> tuple[int, ...]:
        below = list(itertools.pairwise(self.backward_bounds))[:-1]
        again = [layers for layers in below if layers not in self.shape.waiting]
        return tuple(itertools.chain.from_iterable(itertools.starmap(range, again)))

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def describe(self) -> str:
        where = "on the device" if self.boundary == "device" else "on the host"
        lines = [
            f"segments   {self.segments} (layers {_sizes(self.backward_bounds)}), "
            f"{counted(self.slots, 'slot')} of {format_bytes(self.slot_bytes)}, "
            f"{counted(self.gradient_buffers, 'gradient buffer')}, activations between "
            f"segments wait {where}",
        ]
        if self.forward_bounds[:-1] != self.backward_bounds[:-2]:
            lines.append(
                f"forward    {len(self.forward_bounds)} segments (layers "
                f"{_sizes((*self.forward_bounds, self.backward_bounds[-1]))})"
            )
        if self.host_layers:
            layers = "layer" if self.host_layers == 1 else f"{self.host_layers} layers"
            lines.append(f"on host    the first {layers}: only rows are loaded")
        if self.resident_blocks:
            lines.append(f"resident   blocks {_listed(self.resident_blocks)}")
        if self.device_blocks:
            lines.append(f"on device  optimizer of blocks {_listed(self.device_blocks)}")
        if self.shape.waiting:
            lines.append(f"saved      {saved_text(self.shape)}")
        disk = [f"disk       {disk_text(self)}"] if self.on_disk else []
        busy = f", disk {format_seconds(self.disk_s)}" if self.on_disk else ""
        return "\n".join(
            (
                *lines,
                f"device     {format_bytes(self.device_peak_bytes)} predicted peak of "
                f"{format_bytes(self.device_memory_bytes)}",
                f"host       {format_bytes(self.host_bytes)}"
                f"{', gradients spent at once' if self.spends else ''}",
                *disk,
                f"step       {format_seconds(self.step_s)} predicted for "
                f"{counted(self.micro_batches, 'micro-batch', 'es')}: compute "
                f"{format_seconds(self.compute_s)}, load "
                f"{format_seconds(self.load_s)}, unload {format_seconds(self.unload_s)}, update "
                f"{format_seconds(self.update_s)}{busy}; bound by {self.bound}",
            )
        )


def disk_text(plan: Plan) -> str:
    """Return what is on disk, and what a disk wears out by: bytes written."""
    written = plan.disk_written_bytes
    a_day = written * DAY_S / plan.step_s
    return (
        f"{', '.join(plan.on_disk)}: {format_bytes(plan.disk_bytes)}; {format_bytes(written)} "
        f"written a step, {format_bytes(a_day)} a day"
    )


def saved_text(shape: Shape) -> str:
    """Return what happens to what forward saves, as text such as `layers 0 to 3 recomputed`."""
    offloaded = "offloaded" if shape.remakes else "offloaded whole"
    words = {"recompute": "recomputed", "keep": "kept", "offload": offloaded}
    runs: list[tuple[str, int, int]] = []
    for layers in list(itertools.pairwise(shape.backward_bounds))[:-1]:
        word = words[shape.waiting.get(layers, "recompute")]
        same = bool(runs) and runs[-1][0] == word
        runs.append((word, runs.pop()[1] if same else layers[0], layers[1]))
    return ", ".join(
        f"layer {start} {word}" if stop == start + 1 else f"layers {start} to {stop - 1} {word}"
        for word, start, stop in runs
    )


def _listed(blocks: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else _few(run) for run in runs)


def _few(blocks: list[int]) -> str:
    return ", ".join(map(str, blocks))


def _sizes(bounds: tuple[int, ...]) -> str:
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    return "+".join(map(str, sizes)) if len(sizes) <= 12 else f"{min(sizes)} to {max(sizes)}"


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
        staging_bytes = host_gradients(layout, plan.shape, spends=True).total_bytes
        held += staging_bytes
        yield Region("host", "gradients", "until their own update", staging_bytes)
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
