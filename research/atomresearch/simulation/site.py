"""From a peer's plan to what the simulations take: layers, step and bytes on the wire."""

from __future__ import annotations

import math

from atomresearch.simulation.compare import ELEMENTS_PER_S, LayerWork, Site
from atomtrain.planning.catalogue import UPDATE_BYTES_PER_PARAMETER
from atomtrain.planning.search.batch_search import Prospect
from atomtrain.swarm.codecs.codec import base_codec, codec_named, encoded_bytes
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.membership.rules import GROUP_SIZE

_LARGEST_FRAGMENT_BYTES = 64 << 20
_LEAST_FRAGMENTS = 4


def site_of(found: Prospect, peers: int, local_steps: int, wire: str) -> Site:
    """Return so many peers that all follow the plan `found`, in groups of the usual size.

    Raises:
        ConfigError: fewer than 2 peers, or an unknown wire format.
    """
    parameters = found.analysis.parameters
    count = fragments_of(parameters, local_steps)
    elements = -(-parameters // count)
    group = min(peers, GROUP_SIZE)
    both = travelling_bytes(elements, wire, group)
    travelling = sum(both) + (base_bytes(elements, wire) if peers > group else 0)
    return Site(
        peers=peers,
        step_s=found.plan.step_s,
        micro_batches=found.plan.micro_batches,
        micro_batch_tokens=found.micro_batch * found.context_tokens,
        layers=_layers(found),
        device_memory_bytes=found.machine.device_memory_bytes,
        exchange_bytes=[int((group - 1) / group * travelling)] * count,
        local_steps=local_steps,
        codec_s=elements / ELEMENTS_PER_S[wire],
        memory_bytes_per_s=found.machine.device_update_rate * UPDATE_BYTES_PER_PARAMETER,
    )


def fragments_of(parameters: int, local_steps: int) -> int:
    """Return how many fragments a run makes of so many parameters, each averaged once in
    `local_steps`: the engine's (`Engine.fragment_ranges`), joined so that no more than one is due
    in a step (`training.peering.most_fragments`).
    """
    of_engine = max(_LEAST_FRAGMENTS, -(-4 * parameters // _LARGEST_FRAGMENT_BYTES))
    return min(of_engine, max(1, local_steps))


def travelling_bytes(elements: int, wire: str, peers: int) -> tuple[int, int]:
    """Return the bytes of `elements` as a contribution, and as the mean of so many peers."""
    codec = codec_named(wire)
    whole = Span(0, elements)
    return encoded_bytes(codec, whole), encoded_bytes(codec.for_mean(peers, 0), whole)


def base_bytes(elements: int, wire: str) -> int:
    """Return the bytes of `elements` as a base, which rounds of several groups have."""
    return encoded_bytes(base_codec(codec_named(wire)), Span(0, elements))


def _layers(found: Prospect) -> list[LayerWork]:
    chain, costs = found.analysis.chain, found.analysis.costs
    layers = []
    for index, cost in enumerate(costs.layers):
        time = found.times[cost.kind]
        crossing = [costs.values[name] for name in chain.crossing(index + 1)]
        shapes = [value.shape for value in crossing if value.requires_grad and value.shape]
        layers.append(
            LayerWork(
                forward_s=time.forward_s,
                # The measure of backward includes recomputing, which a stage need not do.
                backward_s=time.backward_s - time.forward_s,
                parameters=cost.parameters,
                kept_bytes=cost.kept_bytes,
                boundary_values=sum(math.prod(shape) for shape in shapes),
                boundary_rows=sum(math.prod(shape[:-1]) for shape in shapes),
            )
        )
    return layers
