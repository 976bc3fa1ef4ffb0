"""Which pipeline is best on a given link: every combination predicted, the best ones measured.

Searched: one pipeline of all peers or several shorter ones whose gradients are averaged in each
step (as bfloat16), sequences in a micro-batch, micro-batches in flight (from 1F1B's number to
GPipe's), one or two chunks a rank, 16 or 8 bits a value on the wire, keeping activations or
recomputing. What does not fit the device budget is out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from atombench.network.model import ModelSetup, Speeds
from atombench.network.pipeline import LIBRARY
from atombench.network.prediction import Candidate, Shape, simulated
from atomresearch.simulation.link import CUBIC, PipelineLink
from atomtrain.errors import PlanError

_CHUNKS = (1, 2)
_WIRES = ("bfloat16", "int8")
_WORTH = 2.0
_MORE_IN_FLIGHT = 4


def candidates(
    setup: ModelSetup, peers: int, sequences: int, speeds: Speeds, way: PipelineLink,
    budget_bytes: int, cores: float = math.inf,
) -> list[Candidate]:  # fmt: skip
    """Return what fits, best prediction first; the library's schedules are not among them.

    All peers share the `cores`. How BBR paces connections is left out: packet by packet for every
    candidate the search would take minutes, and what is best is measured among several anyway.

    Raises:
        PlanError: nothing fits the budget; says what the smallest would need.
    """
    way = replace(way, congestion_control=CUBIC)
    found = [
        candidate
        for pipelines in range(1, peers // 2 + 1)
        if peers % pipelines == 0
        for micro_batch in speeds.sizes
        if sequences % (micro_batch * pipelines) == 0
        for chunks in _CHUNKS
        if peers // pipelines * chunks <= setup.layers + 2
        for wire in _WIRES
        for recompute in (False, True)
        for candidate in simulated(
            Shape(
                setup,
                peers // pipelines,
                pipelines,
                chunks,
                micro_batch,
                sequences // (micro_batch * pipelines),
                wire,
                recompute,
            ),
            speeds,
            way,
            cores,
        )
    ]
    fitting = [candidate for candidate in found if candidate.predicted_bytes <= budget_bytes]
    if not fitting:
        least = min((candidate.predicted_bytes for candidate in found), default=0)
        raise PlanError(
            f"no pipeline of {peers} peers fits the device budget of {budget_bytes} bytes; the "
            f"smallest needs {least} bytes on one of them"
        )
    return sorted(fitting, key=lambda candidate: (candidate.predicted_s, candidate.in_flight))


def to_measure(ranked: Sequence[Candidate], setup: ModelSetup, peers: int) -> list[Candidate]:
    """Return what is worth measuring, best prediction first, the library's schedules last.

    Of each wire the best and the best that is cut differently; of the very best the same with more
    in flight, which real links may want for their queues; nothing that is predicted to take twice
    as long as the best.
    """
    chosen: list[Candidate] = []
    for wire in _WIRES:
        alike = [candidate for candidate in ranked if candidate.wire == wire]
        chosen += alike[:1]
        chosen += [c for c in alike if _cut(c) != _cut(alike[0])][:1]
    chosen += _with_more_in_flight(ranked)
    for chunks, schedule in zip(_CHUNKS, LIBRARY, strict=True):
        # PyTorch's interleaved schedule wants micro-batches in whole turns of all ranks.
        alike = [
            c
            for c in ranked
            if (c.chunks, c.wire, c.recompute, c.pipelines) == (chunks, "bfloat16", False, 1)
            and c.micro_batches % peers == 0
        ]
        if alike:
            best = min(alike, key=lambda c: c.library_s)
            chosen.append(replace(best, schedule=schedule, in_flight=peers * chunks))
    worth = [c for c in chosen if c.predicted_s <= _WORTH * ranked[0].predicted_s]
    told = [c if c.schedule == "own" else replace(c, predicted_s=c.library_s) for c in worth]
    return sorted(told, key=lambda c: (c.schedule != "own", c.predicted_s))


def _with_more_in_flight(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the best pipeline with the most in flight, up to four times as many; or nothing."""
    best = ranked[0]
    more = [
        c
        for c in ranked
        if (_cut(c), c.wire, c.recompute) == (_cut(best), best.wire, best.recompute)
        and best.in_flight < c.in_flight <= _MORE_IN_FLIGHT * best.in_flight
    ]
    return sorted(more, key=lambda c: c.in_flight)[-1:]


def _cut(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.chunks, candidate.micro_batch, candidate.pipelines
