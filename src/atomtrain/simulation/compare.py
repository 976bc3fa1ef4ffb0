"""ATOM and a pipeline of the same machines on the same links, both simulated.

The pipeline gets the benefit of every doubt: stages as even as layers allow, the best number of
stages and of micro-batches in flight, recomputing where that leaves memory for more of them,
transfers that always overlap computation, 8-bit activations at no cost, and, where there are more
peers than stages, several pipelines whose gradients are averaged in no time. A stage's parameters,
gradients and moments must fit its device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from atomtrain.errors import ConfigError
from atomtrain.simulation.pipeline import PipelineLink, PipelineWork, partition, simulate_step
from atomtrain.simulation.swarm import SwarmLink, SwarmRun, SwarmWork, simulate_swarm

PAYLOAD_SHARE = 0.955
"""What Ethernet, IP and TCP headers leave of a link's rate, with packets of 1500 bytes."""
_STATE_BYTES_PER_PARAMETER = 16
_RESIDENT_VALUE_BYTES = 4
_MOST_STAGES = 16
"""More are tried only where fewer do not fit: each makes the bubble longer."""
_MOST_STAGES_AT_ALL = 128
_WIRES = {"16-bit": (2.0, 0), "8-bit": (1.0, 4)}
"""Bytes a value, and bytes a row for its scale."""


class LayerWork(NamedTuple):
    """One layer for one micro-batch."""

    forward_s: float
    backward_s: float
    """Without recomputing."""
    parameters: int
    kept_bytes: int
    """Activations from forward to backward."""
    boundary_values: int
    """Values that the next layers read and that need a gradient."""
    boundary_rows: int
    """Vectors (of the model's width) that they form."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Peers of one kind and what each does."""

    peers: int
    """At least 2."""
    step_s: float
    """A local step of ATOM."""
    micro_batches: int
    """Micro-batches in it."""
    micro_batch_tokens: int
    layers: Sequence[LayerWork]
    device_memory_bytes: int
    exchange_bytes: Sequence[int]
    """See `SwarmWork`."""
    local_steps: int

    def __post_init__(self) -> None:
        """Raises ConfigError for too few peers."""
        if self.peers < 2:
            raise ConfigError(f"a network needs at least 2 peers, not {self.peers}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one peer's step."""
        return self.micro_batches * self.micro_batch_tokens


class PipelineChoice(NamedTuple):
    """The best pipeline on a link."""

    tokens_per_s: float
    """Of all peers; those beyond a whole number of pipelines have nothing to do."""
    stages: int
    pipelines: int
    in_flight: int
    wire: str
    recompute: bool
    """Stages keep their inputs only and run forward again in backward."""
    sent_bytes_per_token: float
    device_bytes: int
    """Of the stage that needs most."""


class Comparison(NamedTuple):
    """Both on one link."""

    bits_per_s: float
    round_trip_s: float
    atom: SwarmRun
    pipeline: PipelineChoice | None
    """`None`: no number of stages fits the devices."""

    @property
    def ratio(self) -> float | None:
        """ATOM's tokens per second to the pipeline's."""
        return self.atom.tokens_per_s / self.pipeline.tokens_per_s if self.pipeline else None


def compare(site: Site, bits_per_s: float, round_trip_s: float) -> Comparison:
    """Simulate both on links of `bits_per_s` each way and `round_trip_s` between any two peers."""
    rate, way_s = PAYLOAD_SHARE * bits_per_s, round_trip_s / 2
    swarm = SwarmWork(
        step_s=[site.step_s] * site.peers,
        tokens_per_step=site.tokens_per_step,
        exchange_bytes=site.exchange_bytes,
        local_steps=site.local_steps,
    )
    atom = simulate_swarm(swarm, SwarmLink(bits_per_s=rate, one_way_s=way_s))
    link = PipelineLink(bits_per_s=rate, one_way_s=way_s)
    found = max(_pipelines(site, link), key=lambda choice: choice.tokens_per_s, default=None)
    return Comparison(bits_per_s, round_trip_s, atom, found)


def _pipelines(site: Site, link: PipelineLink) -> Iterator[PipelineChoice]:
    most = min(site.peers, len(site.layers))
    tried = False
    for stages in range(2, most + 1):
        if stages > (_MOST_STAGES_AT_ALL if not tried else _MOST_STAGES):
            return
        bounds = partition([layer.forward_s + layer.backward_s for layer in site.layers], stages)
        for recompute in (False, True):
            for choice in _of_stages(site, link, bounds, recompute):
                tried = True
                yield choice


def _of_stages(
    site: Site, link: PipelineLink, bounds: Sequence[int], recompute: bool
) -> Iterator[PipelineChoice]:
    stages = len(bounds) - 1
    parts = [site.layers[a:b] for a, b in pairwise(bounds)]
    # As many tokens a step as the same peers have with ATOM.
    micro_batches = stages * site.micro_batches
    forward_s = [sum(layer.forward_s for layer in part) for part in parts]
    backward_s = [sum(layer.backward_s for layer in part) for part in parts]
    if recompute:
        backward_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    state = [_STATE_BYTES_PER_PARAMETER * sum(x.parameters for x in part) for part in parts]
    for in_flight in sorted({min(micro_batches, stages * times) for times in (1, 2, 4, 8)}):
        # Stage s keeps at most its share of what is in flight (see `simulate_step`).
        live = [-(-in_flight * (stages - index) // stages) for index in range(stages)]
        device_bytes = max(
            held + _kept_bytes(site, bounds, index, live[index], recompute)
            for index, held in enumerate(state)
        )
        if device_bytes > site.device_memory_bytes:
            return
        for wire in _WIRES:
            boundary_bytes = max(_boundary_bytes(part[-1], wire) for part in parts[:-1])
            work = PipelineWork(
                ranks=stages,
                forward_s=forward_s,
                backward_s=backward_s,
                micro_batches=micro_batches,
                in_flight=in_flight,
                boundary_bytes=boundary_bytes,
            )
            step = simulate_step(work, link)
            tokens = micro_batches * site.micro_batch_tokens
            pipelines = site.peers // stages
            yield PipelineChoice(
                pipelines * tokens / step.step_s,
                stages,
                pipelines,
                in_flight,
                wire,
                recompute,
                2 * (stages - 1) * boundary_bytes / site.micro_batch_tokens,
                device_bytes,
            )


def _kept_bytes(site: Site, bounds: Sequence[int], stage: int, live: int, recompute: bool) -> int:
    """Return a stage's activations: everything, or only inputs and one micro-batch's rest."""
    part = site.layers[bounds[stage] : bounds[stage + 1]]
    whole = sum(layer.kept_bytes for layer in part)
    if not recompute:
        return live * whole
    before = site.layers[bounds[stage] - 1].boundary_values if stage else 0
    return live * _RESIDENT_VALUE_BYTES * before + whole


def _boundary_bytes(layer: LayerWork, wire: str) -> int:
    a_value, a_row = _WIRES[wire]
    return int(a_value * layer.boundary_values + a_row * layer.boundary_rows)
