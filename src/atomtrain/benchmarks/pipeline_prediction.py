"""What a pipeline takes on a link: time and memory, simulated from the peers' own speeds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from atomtrain.benchmarks.network_model import ModelSetup
from atomtrain.benchmarks.pipeline import encoded_bytes
from atomtrain.benchmarks.shaping import BOTH_WAYS_SHARE, Link
from atomtrain.errors import ConfigError
from atomtrain.simulation.announced import AnnouncedWork, simulate_1f1b
from atomtrain.simulation.interleaved import simulate_interleaved
from atomtrain.simulation.loss import connection_bits_per_s
from atomtrain.simulation.pipeline import (
    Op,
    PipelineLink,
    PipelineWork,
    partition,
    simulate_step,
)
from atomtrain.simulation.replay import replay

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


class Host(NamedTuple):
    """What all peers of a benchmark run on."""

    cores: float = math.inf
    """That they share."""
    congestion_control: str = "cubic"
    """Of TCP connections that do not choose one, by Linux's name."""


class Speeds(NamedTuple):
    """What the peers measured of themselves, all computing at once; the slowest counts."""

    sizes: Mapping[int, Mapping[str, Any]]
    """As `GlooPeer.speeds` returns them, by sequences in a micro-batch."""
    update_parameters_per_s: float

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> Speeds:
        """Put the peers' answers together."""
        sizes = {
            int(size): merged([reply["sizes"][size] for reply in replies], max)
            for size in replies[0]["sizes"]
        }
        return cls(sizes, min(reply["update_parameters_per_s"] for reply in replies))

    def tokens_per_s(self, setup: ModelSetup) -> float:
        """Return one peer's rate of forward and backward over the whole model, at its best."""
        return max(self._rates(setup).values())

    def best_size(self, setup: ModelSetup) -> int:
        """Return the sequences in a micro-batch at which that rate is reached."""
        rates = self._rates(setup)
        return max(rates, key=lambda size: rates[size])

    def _rates(self, setup: ModelSetup) -> dict[int, float]:
        rates = {}
        for size, kinds in self.sizes.items():
            layers = [*_layer_kinds(setup)]
            took_s = sum(kinds[k]["forward_s"] + kinds[k]["backward_s"] for k in layers)
            rates[size] = size * setup.sequence_tokens / took_s
        return rates


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


def simulated(
    shape: Shape, speeds: Speeds, link: Link, host: Host, in_flights: Sequence[int] = ()
) -> list[Candidate]:
    """Return a prediction for each number of micro-batches in flight; none: for all worth trying.

    Times of ranks that share cores are those of orders that know nothing of it: the peers' own.
    """
    setup, kinds = shape.setup, speeds.sizes[shape.micro_batch]
    names = _layer_kinds(setup)
    costs = [kinds[name]["forward_s"] + kinds[name]["backward_s"] for name in names]
    bounds = partition(costs, shape.peers * shape.chunks)
    parts = [names[a:b] for a, b in itertools.pairwise(bounds)]
    wire_s = kinds["wire_s"][shape.wire]
    rows = shape.micro_batch * setup.sequence_tokens
    boundary_bytes = encoded_bytes(shape.wire, rows, setup.width)
    way = PipelineLink(
        bits_per_s=connection_bits_per_s(
            BOTH_WAYS_SHARE * (link.bits_per_s or 1e10),
            link.round_trip_s,
            link.loss_share,
            host.congestion_control,
        ),
        one_way_s=link.round_trip_s / 2,
    )
    numbers = {shape.peers * shape.chunks * times for times in (1, 2, 4, 8)}
    usual = sorted({min(n, shape.micro_batches) for n in numbers} | {shape.micro_batches})
    forward_s = [sum(kinds[k]["forward_s"] for k in part) + wire_s for part in parts]
    backward_s = [sum(kinds[k]["backward_s"] for k in part) + wire_s for part in parts]
    whole = [sum(kinds[k]["kept_bytes"] for k in part) for part in parts]
    kept, recomputed = list(whole), [0.0] * len(parts)
    # A backward has about as much in gradients as its largest layer keeps.
    largest = max(kinds[kind]["kept_bytes"] for kind in names)
    if shape.recompute:
        recomputed[:-1] = whole[:-1]
        backward_s[:-1] = [b + f for f, b in zip(forward_s[:-1], backward_s[:-1], strict=True)]
        kept[:-1] = [4.0 * rows * setup.width] * (len(parts) - 1)
    parameters = [sum(_parameters(setup, k) for k in part) for part in parts]
    averaging_s = _averaging_s(shape, max(_of_ranks(parameters, shape.peers)), way)
    waiting_s = 0.0
    if not shape.recompute and shape.pipelines == 1 and shape.micro_batches % shape.peers == 0:
        announced = AnnouncedWork(
            forward_s=forward_s,
            backward_s=backward_s,
            micro_batches=shape.micro_batches,
            boundary_bytes=boundary_bytes,
        )
        if shape.chunks == 1:
            waiting_s = simulate_1f1b(announced, way)
        else:
            waiting_s = simulate_interleaved(announced, shape.peers, way)
    found = []
    # Of all pipelines, which do the same at the same time, each has its share of the cores.
    cores = host.cores / shape.pipelines
    crowd = max(1.0, shape.peers / cores)
    for in_flight in in_flights or usual:
        work = PipelineWork(
            ranks=shape.peers,
            forward_s=forward_s,
            backward_s=backward_s,
            micro_batches=shape.micro_batches,
            in_flight=in_flight,
            boundary_bytes=boundary_bytes,
        )
        step = simulate_step(work, way)
        step_s = step.step_s if crowd == 1 else replay(work, way, step.orders, cores)
        update_s = crowd * max(parameters) * shape.chunks / speeds.update_parameters_per_s
        update_s += averaging_s
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
                bounds=tuple(bounds),
                orders=tuple(tuple(order) for order in step.orders),
                predicted_s=step_s + update_s,
                predicted_bytes=_most_bytes(
                    step.orders,
                    parameters,
                    kept,
                    [again + largest for again in recomputed],
                    boundary_bytes,
                    _ahead(in_flight),
                ),
                library_s=(waiting_s or step_s) + update_s,
            )
        )
    return found


def predicted_again(
    name: str, setup: ModelSetup, peers: int, speeds: Speeds, link: Link, host: Host
) -> float:
    """Return the seconds of a step of the candidate that `Candidate.name` calls so.

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
    (found,) = simulated(shape, speeds, link, host, [int(told["in_flight"])])
    return found.predicted_s if told["schedule"] == "own" else found.library_s


def _of_ranks(parameters: Sequence[int], ranks: int) -> list[int]:
    """Return each rank's parameters, of those of each chunk."""
    return [sum(parameters[rank::ranks]) for rank in range(ranks)]


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


def _most_bytes(
    orders: Sequence[Sequence[Op]],
    parameters: Sequence[int],
    kept: Sequence[float],
    workspace: Sequence[float],
    boundary_bytes: int,
    ahead: int,
) -> int:
    """Return the memory of the rank that needs most: state, kept activations, receive buffers.

    `parameters`, `kept` (from forward to backward) and `workspace` (in backward) are chunks' own.
    """
    most, peers = 0.0, len(orders)
    for rank, order in enumerate(orders):
        state = 16 * sum(parameters[rank::peers])
        live = peak = 0.0
        for op in order:
            if op.backward:
                peak = max(peak, live + workspace[op.chunk])
            live += -kept[op.chunk] if op.backward else kept[op.chunk]
            peak = max(peak, live)
        ends = (0, len(kept) - 1)
        received = sum(op.chunk != ends[op.backward] and peers > 1 for op in order)
        sent = sum(op.chunk != ends[not op.backward] and peers > 1 for op in order)
        buffers = min(received, ahead) + min(sent, ahead)
        most = max(most, state + peak + buffers * boundary_bytes)
    return int(most)


def _layer_kinds(setup: ModelSetup) -> list[str]:
    return ["embedding", *["block"] * setup.layers, "head"]


def _parameters(setup: ModelSetup, kind: str) -> int:
    if kind == "block":
        return 12 * setup.width**2 + 13 * setup.width
    return setup.vocabulary * setup.width + setup.sequence_tokens * setup.width


def merged(values: Sequence[Any], choose: Callable[[Sequence[Any]], Any]) -> Any:
    """Return what `choose` (`min`, `max`) takes of each number in equal trees of mappings."""
    if isinstance(values[0], Mapping):
        return {key: merged([value[key] for value in values], choose) for key in values[0]}
    return choose(values)
