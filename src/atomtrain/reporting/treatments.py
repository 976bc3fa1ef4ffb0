"""What each treatment of embedding and head saves: planned again with each one on and off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from atomtrain.errors import PlanError
from atomtrain.planning.catalogue import Gpu, machine_for
from atomtrain.planning.layout import Layout
from atomtrain.planning.plan import Request
from atomtrain.planning.prospect import Prospect
from atomtrain.planning.schedule import training_visits
from atomtrain.planning.search import make_plan
from atomtrain.reporting.place import compute_of
from atomtrain.reporting.subject import Subject

HEAD_PIECES = 8


class Treatment(NamedTuple):
    """One way to treat the weights of the vocabulary, and what it gives."""

    text: str
    found: Prospect | PlanError
    """For one micro-batch of one sequence."""


def treatments(
    model: Subject, card: Gpu, host_memory_bytes: int, micro_batches: int
) -> Iterator[Treatment]:
    """Yield the plans of a model with every treatment pinned off, then on.

    Args:
        model: With its head whole.
        card: Where it trains.
        host_memory_bytes: Of its host.
        micro_batches: Of one sequence each, in a step.
    """
    split = dataclasses.replace(model, head_pieces=HEAD_PIECES, _analyses={})
    for text, subject, resident in (
        ("none", model, ()),
        ("resident where it pays", model, None),
        (f"head in {HEAD_PIECES} pieces", split, ()),
        ("both", split, None),
    ):
        request = Request(micro_batches=micro_batches, resident=resident)
        yield Treatment(text, _planned(subject, card, host_memory_bytes, request))


def loaded_bytes(found: Prospect) -> int:
    """Return the parameters that cross the link to the device in a step, in bytes."""
    layout, shape = Layout(found.analysis.chain), found.plan.shape
    resident = shape.resident_blocks
    loads = [visit.layers for visit in training_visits(shape) if visit.load]
    return sum(layout.segment_bytes(*layers, resident) for layers in loads) + sum(
        layout.block_bytes(block) for block in resident
    )


def _planned(
    model: Subject, card: Gpu, host_memory_bytes: int, request: Request
) -> Prospect | PlanError:
    analysis = model.analyse(1)
    times = compute_of(card, "fp32").estimate(analysis)
    machine = machine_for(card, host_memory_bytes)
    try:
        plan = make_plan(analysis.chain, analysis.costs, times, machine, request)
    except PlanError as error:
        return error
    return Prospect(
        plan=plan,
        machine=machine,
        analysis=analysis,
        times=times,
        micro_batch=1,
        context_tokens=model.context_tokens,
    )
