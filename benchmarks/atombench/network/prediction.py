"""What a pipeline takes on a link: time and memory, simulated from the peers' own speeds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from atombench.links.shaping import Link
from atombench.network.model import ModelSetup, Speeds, layer_kinds
from atombench.network.pipeline import encoded_bytes
from atombench.network.setup import UNSHAPED_BITS_PER_S
from atomresearch.simulation.announced import AnnouncedWork, simulate_1f1b, simulate_interleaved
from atomresearch.simulation.link import BOTH_WAYS_SHARE, CUBIC, PipelineLink, connection_bits_per_s
from atomresearch.simulation.pipeline import Op, PipelineWork, partition, simulate_step
from atomresearch.simulation.replay import replay
from atomtrain.errors import ConfigError

_LEAST_AHEAD = 16
_GRADIENT_BYTES = 2
"""As `Stage` averages them between pipelines."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the pipeline."""

    schedule: str
    """`own`, or a name in `LIBRARY`."""
    chunks: int
    """Chunks on each rank."""
    micro_batch: int
    """Sequences."""
    micro_batches: int
    """Of each pipeline in a step."""
    pipelines: int
    """Side by side, each of as many peers."""
    in_flight: int
    wire: str
    recompute: bool
    bounds: tuple[int, ...]
    orders: tuple[tuple[Op, ...], ...]
    predicted_s: float
    """A step's seconds."""
    predicted_bytes: int
    """Device memory of the rank that needs most."""
    library_s: float
    """A step's seconds under PyTorch's own schedule with as many chunks, where it can run: what
    recomputes, or has micro-batches that do not come in whole turns of all ranks, has ours."""

    def plan(self) -> dict[str, Any]:
        """Return what the peers are told."""
        return {
            "schedule": self.schedule,
            "bounds": list(self.bounds),
            "orders": [list(order) for order in self.orders],
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "pipelines": self.pipelines,
            "wire": self.wire,
            "ahead": _ahead(self.in_flight),
            "recompute": self.recompute,
        }

    def name(self) -> str:
        """Return what a person calls it."""
        chunks = f", {self.chunks} chunks a rank" if self.chunks > 1 else ""
        return (
            f"{self.schedule}, {self.micro_batches} micro-batches of {self.micro_batch}, "
            f"{self.in_flight} in flight, {self.wire}{chunks}"
            f"{', recomputing' if self.recompute else ''}"
            f"{f', {self.pipelines} such pipelines' if self.pipelines > 1 else ''}"
        )


_NAME = re.compile(
    r"(?P<schedule>\w+), (?P<micro_batches>\d+) micro-batches of (?P<micro_batch>\d+), "
    r"(?P<in_flight>\d+) in flight, (?P<wire>\w+)(, (?P<chunks>\d+) chunks a rank)?"
    r"(?P<recompute>, recomputing)?(, (?P<pipelines>\d+) such pipelines)?"
)


class Shape(NamedTuple):
    """How a pipeline is cut, but for how many micro-batches are in flight."""

    setup: ModelSetup
    peers: int
    """Of one pipeline."""
    pipelines: int
    chunks: int
    micro_batch: int
    micro_batches: int
    wire: str
    recompute: bool


def way_of(
    link: Link, congestion_control: str = CUBIC, probe: Mapping[str, Any] | None = None
) -> PipelineLink:
    """Return what a connection between two stages has on a benchmark's link.

    Args:
        link: As it was asked for.
        congestion_control: Of TCP connections that do not choose one, by Linux's name.
        probe: What was measured of the link, as `GlooPeer.probe` returns it; `None`: nothing.
    """
    bits_per_s = BOTH_WAYS_SHARE * (link.bits_per_s or UNSHAPED_BITS_PER_S)
    measured = (probe or {}).get("both_ways_bits_per_s")
    # A probe is short: what it needs to mend its last losses says nothing of a longer time.
    if measured is not None and link.bits_per_s is not None and not link.loss_share:
        bits_per_s = min(bits_per_s, measured)
    return PipelineLink(
        bits_per_s=connection_bits_per_s(
            bits_per_s, link.round_trip_s, link.loss_share, congestion_control
        ),
        one_way_s=link.round_trip_s / 2,
        burst_s=link.burst_s,
        loss_share=link.loss_share,
        congestion_control=congestion_control,
    )


def simulated(
    shape: Shape,
    speeds: Speeds,
    way: PipelineLink,
    cores: float = math.inf,
    in_flights: Sequence[int] = (),
    compute_s: Sequence[float] = (),
) -> list[Candidate]:
    """Return a prediction for each number of micro-batches in flight; none: for all worth trying.

    Orders are those of ranks with a core each and of packets that arrive: the peers' own.

    Args:
        shape: The pipeline.
        speeds: Of layers.
        way: Between any two stages.
        cores: That all peers share.
        in_flights: Numbers of micro-batches in flight.
        compute_s: Seconds of a core that each rank's operations of a step were measured to take;
            none: those of their layers.
    """
    costs = _costs(shape, speeds)
    real = _as_measured(costs, shape, compute_s)
    # Of all pipelines, which do the same at the same time, each has its share of the cores.
    cores = cores / shape.pipelines
    crowd = max(1.0, shape.peers / cores)
    largest = max(sum(costs.parameters[rank :: shape.peers]) for rank in range(shape.peers))
    update_s = crowd * largest / speeds.update_parameters_per_s
    update_s += _averaging_s(shape, largest, way)
    waiting_s = _library_s(shape, real, way)
    found = []
    for in_flight in in_flights or _usual_in_flight(shape):
        work = PipelineWork(
            ranks=shape.peers,
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            micro_batches=shape.micro_batches,
            in_flight=in_flight,
            boundary_bytes=costs.boundary_bytes,
        )
        step = simulate_step(work, replace(way, loss_share=0.0))
        step_s = step.step_s
        if shape.peers > 2 or crowd > 1 or way.loss_share or real is not costs:
            work = replace(work, forward_s=real.forward_s, backward_s=real.backward_s)
            step_s = replay(work, way, step.orders, cores)
        found.append(
            Candidate(
                schedule="own",
                chunks=shape.chunks,
                micro_batch=shape.micro_batch,
                micro_batches=shape.micro_batches,
                pipelines=shape.pipelines,
                in_flight=in_flight,
                wire=shape.wire,
                recompute=shape.recompute,
                bounds=tuple(costs.bounds),
                orders=tuple(tuple(order) for order in step.orders),
                predicted_s=step_s + update_s,
                predicted_bytes=_most_bytes(step.orders, costs, _ahead(in_flight)),
                library_s=(waiting_s or step_s) + update_s,
            )
        )
    return found


def predicted_again(
    name: str,
    setup: ModelSetup,
    peers: int,
    speeds: Speeds,
    way: PipelineLink,
    cores: float = math.inf,
    compute_s: Sequence[float] = (),
) -> float:
    """Return the seconds of a step of the candidate that `Candidate.name` calls so.

    `cores` and `compute_s` are as for `simulated`.

    Raises:
        ConfigError: no candidate has such a name.
    """
    told = _NAME.fullmatch(name)
    if told is None:
        raise ConfigError(f"{name!r} is not the name of a pipeline, as `Candidate.name` gives it")
    pipelines = int(told["pipelines"] or 1)
    shape = Shape(
        setup,
        peers // pipelines,
        pipelines,
        int(told["chunks"] or 1),
        int(told["micro_batch"]),
        int(told["micro_batches"]),
        told["wire"],
        told["recompute"] is not None,
    )
    (found,) = simulated(shape, speeds, way, cores, [int(told["in_flight"])], compute_s)
    return found.predicted_s if told["schedule"] == "own" else found.library_s


class _Costs(NamedTuple):
    """What a shape's chunks take, each."""

    bounds: list[int]
    """Of the chunks in the chain of layers."""
    forward_s: list[float]
    """Of one micro-batch, with encoding what is sent and decoding what comes."""
    backward_s: list[float]
    parameters: list[int]
    kept_bytes: list[float]
    """From forward to backward, of one micro-batch."""
    workspace_bytes: list[float]
    """In backward."""
    boundary_bytes: int


def _costs(shape: Shape, speeds: Speeds) -> _Costs:
    setup, kinds = shape.setup, speeds.sizes[shape.micro_batch]
    names = layer_kinds(setup)
    layers_s = [kinds[name]["forward_s"] + kinds[name]["backward_s"] for name in names]
    bounds = partition(layers_s, shape.peers * shape.chunks)
    parts = [names[a:b] for a, b in itertools.pairwise(bounds)]
    wire_s = kinds["wire_s"][shape.wire]
    rows = shape.micro_batch * setup.sequence_tokens
    forward_s = [sum(kinds[k]["forward_s"] for k in part) + wire_s for part in parts]
    backward_s = [sum(kinds[k]["backward_s"] for k in part) + wire_s for part in parts]
    kept_bytes = [float(sum(kinds[k]["kept_bytes"] for k in part)) for part in parts]
    # A backward has about as much in gradients as its largest layer keeps.
    largest_bytes = max(kinds[kind]["kept_bytes"] for kind in names)
    workspace_bytes = [largest_bytes] * len(parts)
    if shape.recompute:
        backward_s[:-1] = [b + f for f, b in zip(forward_s[:-1], backward_s[:-1], strict=True)]
        workspace_bytes[:-1] = [kept + largest_bytes for kept in kept_bytes[:-1]]
        kept_bytes[:-1] = [4.0 * rows * setup.width] * (len(parts) - 1)
    return _Costs(
        bounds,
        forward_s,
        backward_s,
        [sum(_parameters(setup, kind) for kind in part) for part in parts],
        kept_bytes,
        workspace_bytes,
        encoded_bytes(shape.wire, rows, setup.width),
    )


def _as_measured(costs: _Costs, shape: Shape, compute_s: Sequence[float]) -> _Costs:
    """Return the costs with times that add up to what each rank was measured to compute."""
    if not compute_s:
        return costs
    both_s = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    shares = [
        measured_s / (shape.micro_batches * sum(both_s[rank :: shape.peers]))
        for rank, measured_s in enumerate(compute_s)
    ]
    of_chunk = [shares[chunk % shape.peers] for chunk in range(len(both_s))]
    return costs._replace(
        forward_s=[s * share for s, share in zip(costs.forward_s, of_chunk, strict=True)],
        backward_s=[s * share for s, share in zip(costs.backward_s, of_chunk, strict=True)],
    )


def _usual_in_flight(shape: Shape) -> list[int]:
    """Return the numbers of micro-batches in flight that are worth trying."""
    numbers = {shape.peers * shape.chunks * times for times in (1, 2, 4, 8)}
    return sorted({min(n, shape.micro_batches) for n in numbers} | {shape.micro_batches})


def _library_s(shape: Shape, costs: _Costs, way: PipelineLink) -> float:
    """Return a step's seconds under PyTorch's own schedule; 0: it cannot run this."""
    if shape.recompute or shape.pipelines > 1 or shape.micro_batches % shape.peers:
        return 0.0
    work = AnnouncedWork(
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        micro_batches=shape.micro_batches,
        boundary_bytes=costs.boundary_bytes,
    )
    if shape.chunks == 1:
        return simulate_1f1b(work, way)
    return simulate_interleaved(work, shape.peers, way)


def _averaging_s(shape: Shape, parameters: int, way: PipelineLink) -> float:
    """Return what averaging the gradients of the largest stage with other pipelines takes.

    A ring over K pipelines: 2 (K - 1) messages, each of a K-th of two bytes a parameter.
    """
    messages = 2 * (shape.pipelines - 1)
    message_bytes = _GRADIENT_BYTES * parameters / shape.pipelines
    return messages * (8 * message_bytes / way.bits_per_s + way.one_way_s)


def _ahead(in_flight: int) -> int:
    """Return how many receives are posted before they are needed, and how many sends are under way:
    there and back, with room."""
    return max(_LEAST_AHEAD, 2 * in_flight)


def _most_bytes(orders: Sequence[Sequence[Op]], costs: _Costs, ahead: int) -> int:
    """Return the memory of the rank that needs most: state, kept activations, receive buffers."""
    kept = costs.kept_bytes
    most, peers = 0.0, len(orders)
    for rank, order in enumerate(orders):
        state = 16 * sum(costs.parameters[rank::peers])
        live = peak = 0.0
        for op in order:
            if op.backward:
                peak = max(peak, live + costs.workspace_bytes[op.chunk])
            live += -kept[op.chunk] if op.backward else kept[op.chunk]
            peak = max(peak, live)
        ends = (0, len(kept) - 1)
        received = sum(op.chunk != ends[op.backward] and peers > 1 for op in order)
        sent = sum(op.chunk != ends[not op.backward] and peers > 1 for op in order)
        buffers = min(received, ahead) + min(sent, ahead)
        most = max(most, state + peak + buffers * costs.boundary_bytes)
    return int(most)


def _parameters(setup: ModelSetup, kind: str) -> int:
    if kind == "block":
        return 12 * setup.width**2 + 13 * setup.width
    return setup.vocabulary * setup.width + setup.sequence_tokens * setup.width
