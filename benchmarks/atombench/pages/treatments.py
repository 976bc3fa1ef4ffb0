"""What each treatment of embedding and head saves: planned again with each one on and off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.catalogue import Gpu, machine_for
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.plan.schedule import training_visits
from atomtrain.planning.search.batch_search import Analysis, Prospect
from atomtrain.planning.search.search import least_budget_bytes, make_plan
from atomtrain.views.plans.place import compute_of
from atomtrain.views.plans.subject import Subject

HEAD_PIECES = 8
Times = Mapping[str, LayerTime]


class Treatment(NamedTuple):
    """One way to treat the weights of the vocabulary, and what it gives."""

    text: str
    least_bytes: int
    """Device memory with which some plan works, however slow."""
    found: Prospect | PlanError
    """Micro-batches of one sequence."""


class _Fixed(NamedTuple):
    """Fields of a request."""

    resident: tuple[int, ...] | None
    device_blocks: tuple[int, ...] | None
    host_layers: int | None


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
    for text, subject, fixed in (
        ("none", model, _Fixed((), (), 0)),
        ("embedding on the host", model, _Fixed((), (), 1)),
        ("resident where it pays", model, _Fixed(None, (), 0)),
        ("optimizer on the device where it pays", model, _Fixed(None, None, 0)),
        (f"head in {HEAD_PIECES} pieces", split, _Fixed((), (), 0)),
        ("all, where they pay", split, _Fixed(None, None, None)),
    ):
        request = Request(micro_batches=micro_batches, **fixed._asdict())
        machine = machine_for(card, host_memory_bytes)
        analysis = subject.analyse(1)
        times = compute_of(card, "fp32").estimate(analysis)
        found = _planned(subject, analysis, times, machine, request)
        least_bytes = least_budget_bytes(analysis.chain, analysis.costs, times, machine, request)
        yield Treatment(text, least_bytes, found)


def loaded_bytes(found: Prospect) -> int:
    """Return the parameters that cross the link to the device in a step, in bytes."""
    layout, shape = Layout(found.analysis.chain), found.plan.shape
    resident = shape.resident_blocks
    coming = set(resident) - set(shape.device_blocks)
    loads = [visit.layers for visit in training_visits(shape) if visit.load]
    return sum(layout.segment_bytes(*layers, resident) for layers in loads) + sum(
        layout.block_bytes(block) for block in coming
    )


def _planned(
    model: Subject, analysis: Analysis, times: Times, machine: Machine, request: Request
) -> Prospect | PlanError:
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
