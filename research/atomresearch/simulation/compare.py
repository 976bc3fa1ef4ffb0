"""ATOM and a pipeline of the same machines on the same links, both simulated.

The pipeline gets the benefit of every doubt: stages as even as layers allow, the best number of
stages and of micro-batches in flight, steps large enough for a small bubble, recomputing where that
leaves memory for more micro-batches, transfers that always overlap computation, bfloat16 or 8-bit
activations, whichever is faster with what encoding takes, and, where there are more peers than
stages, several pipelines whose gradients are averaged in no time. A stage's parameters, gradients
and moments must fit its device.

What it takes to encode what travels is measured, so that no format is simulated as free.
`atom bench simulation` measures the figures again and prints them beside those that are used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from atomresearch.simulation.link import PAYLOAD_SHARE, PipelineLink
from atomresearch.simulation.pipeline import PipelineWork, partition, simulate_step
from atomresearch.simulation.swarm import SwarmLink, SwarmRun, SwarmWork, simulate_swarm
from atomtrain.errors import ConfigError

_COPY_BYTES = 8
"""Read and written to copy a float32."""


class ActivationWire(NamedTuple):
    """How a pipeline's activations and their gradients travel."""

    name: str
    value_bytes: int
    row_bytes: int
    """Besides, for each vector of the model's width: its scale."""
    copies: float
    """Encoding and decoding a value takes as long as copying a float32 so many times. Measured on a
    processor; a GPU, whose element-wise kernels wait for memory likewise, is given the same."""

    def payload_bytes(self, values: int, rows: int) -> int:
        """Return the bytes of so many values in so many rows."""
        return self.value_bytes * values + self.row_bytes * rows

    def seconds(self, values: int, memory_bytes_per_s: float) -> float:
        """Return the seconds of encoding and decoding, once each, where memory has this rate."""
        return self.copies * _COPY_BYTES * values / memory_bytes_per_s


ACTIVATION_WIRES = (
    ActivationWire("bfloat16", 2, 0, 2.0),
    ActivationWire("int8", 1, 4, 5.5),
)
"""Both are tried, on every link."""
ELEMENTS_PER_S: Mapping[str, float] = {
    "float32": 1.5e9,
    "float16": 6e8,
    "int8": 3.3e8,
    "int4": 1.5e8,
    "topk": 4e7,
}
"""Elements of a fragment a second that a member of a round gets through on one core: it encodes its
contribution, decodes as much of others' and adds it up, and decodes the means."""


_STATE_BYTES_PER_PARAMETER = 16
_RESIDENT_VALUE_BYTES = 4
_LEAST_MICRO_BATCHES = 8
"""For each stage: with as many the bubble is at most a ninth of the step."""
_STAGES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SLOWER_IN_VAIN = 2
"""After so many numbers of stages in a row that are no faster, more are not tried: each stage makes
the bubble longer and adds a link."""


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
    codec_s: float = 0.0
    """See `SwarmWork`."""
    memory_bytes_per_s: float = math.inf
    """Of the device, reached by element-wise operations: what encodes a pipeline's activations."""

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
    """How activations travel."""
    recompute: bool
    """Stages keep their inputs only and run forward again in backward."""
    sent_bytes_per_token: float
    device_bytes: int
    """Of the stage that needs most."""
    micro_batches: int
    """Of each pipeline in a step."""
    stage_s: float
    """Forward and backward of one micro-batch at the slowest stage."""
    stage_parameters: int
    """Of the stage with most of them."""
    boundary_bytes: int
    """See `PipelineWork`."""


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
        codec_s=site.codec_s,
    )
    atom = simulate_swarm(swarm, SwarmLink(bits_per_s=rate, one_way_s=way_s))
    fastest = pipelines(site, PipelineLink(bits_per_s=rate, one_way_s=way_s))
    best = max(fastest, key=lambda choice: choice.tokens_per_s, default=None)
    return Comparison(bits_per_s, round_trip_s, atom, best)


def pipelines(site: Site, link: PipelineLink) -> list[PipelineChoice]:
    """Return the fastest pipeline of each number of stages that is worth trying.

    Args:
        site: The peers, all alike and always there.
        link: Joins each of them to the others.

    Returns:
        Fewest stages first; empty if no number of stages fits the devices.
    """
    choices: list[PipelineChoice] = []
    best_tokens_per_s, in_vain = 0.0, 0
    times_s = [layer.forward_s + layer.backward_s for layer in site.layers]
    for stages in _STAGES:
        if stages > min(site.peers, len(site.layers)) or in_vain == _SLOWER_IN_VAIN:
            break
        bounds = partition(times_s, stages)
        found = [
            choice
            for wire in ACTIVATION_WIRES
            for again in (False, True)
            for choice in _of_stages(site, link, bounds, wire, again)
        ]
        if found:
            choices.append(max(found, key=lambda choice: choice.tokens_per_s))
        if found and choices[-1].tokens_per_s > best_tokens_per_s:
            best_tokens_per_s, in_vain = choices[-1].tokens_per_s, 0
        elif choices:
            in_vain += 1
    return choices


def _of_stages(
    site: Site, link: PipelineLink, bounds: Sequence[int], wire: ActivationWire, recompute: bool
) -> Iterator[PipelineChoice]:
    stages = len(bounds) - 1
    parts = [site.layers[a:b] for a, b in pairwise(bounds)]
    # As many tokens a step as the same peers have with ATOM, or more: against the bubble.
    micro_batches = stages * max(site.micro_batches, _LEAST_MICRO_BATCHES)
    forward_s = [sum(layer.forward_s for layer in part) for part in parts]
    backward_s = [sum(layer.backward_s for layer in part) for part in parts]
    if recompute:
        backward_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    # What comes in is decoded, what goes out is encoded: half of both at the pipeline's ends.
    values = max(part[-1].boundary_values for part in parts[:-1])
    wire_s = wire.seconds(values, site.memory_bytes_per_s)
    coding_s = [wire_s * (1.0 if 0 < index < stages - 1 else 0.5) for index in range(stages)]
    forward_s = [a + b for a, b in zip(forward_s, coding_s, strict=True)]
    backward_s = [a + b for a, b in zip(backward_s, coding_s, strict=True)]
    boundary_bytes = max(
        wire.payload_bytes(part[-1].boundary_values, part[-1].boundary_rows) for part in parts[:-1]
    )
    parameters = [sum(layer.parameters for layer in part) for part in parts]
    state = [_STATE_BYTES_PER_PARAMETER * count for count in parameters]
    for in_flight in sorted({min(micro_batches, stages * times) for times in (1, 2, 4, 8)}):
        # Stage s keeps at most its share of what is in flight (see `simulate_step`).
        live = [-(-in_flight * (stages - index) // stages) for index in range(stages)]
        device_bytes = max(
            held + _kept_bytes(site, bounds, index, live[index], recompute)
            for index, held in enumerate(state)
        )
        if device_bytes > site.device_memory_bytes:
            return
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
        count = site.peers // stages
        yield PipelineChoice(
            count * tokens / step.step_s,
            stages,
            count,
            in_flight,
            wire.name,
            recompute,
            2 * (stages - 1) * boundary_bytes / site.micro_batch_tokens,
            device_bytes,
            micro_batches,
            max(f + b for f, b in zip(forward_s, backward_s, strict=True)),
            max(parameters),
            boundary_bytes,
        )


def _kept_bytes(site: Site, bounds: Sequence[int], stage: int, live: int, recompute: bool) -> int:
    """Return a stage's activations: everything, or only inputs and one micro-batch's rest."""
    part = site.layers[bounds[stage] : bounds[stage + 1]]
    whole = sum(layer.kept_bytes for layer in part)
    if not recompute:
        return live * whole
    before = site.layers[bounds[stage] - 1].boundary_values if stage else 0
    return live * _RESIDENT_VALUE_BYTES * before + whole
