"""What a run tells of itself beside its steps: how it begins, its plan, what a step looked like."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atomtrain.events import EventLog
from atomtrain.planning.timeline import Span
from atomtrain.reporting.trace import Account, write_trace
from atomtrain.training.peering import pasted_address
from atomtrain.training.plan_event import tell_plan
from atomtrain.training.setup import Session

if TYPE_CHECKING:
    from atomtrain.swarm import RoundReport, Swarm

_MOST_SPANS = 5000
"""Beyond them a step's spans are no picture any more, and too long a line."""


def announce(session: Session, events: EventLog) -> None:
    """Tell how a run begins, and the plan that it follows."""
    engine, swarm = session.engine, session.swarm
    events.emit(
        "run_started",
        run=session.run,
        peer=session.name,
        model=session.recipe.model,
        device=engine.device_name,
        device_memory_bytes=engine.device.memory_bytes,
        parameters=engine.parameters,
        state_bytes=engine.state_bytes,
        steps=session.recipe.steps,
        tokens_per_step=session.recipe.tokens_per_step,
        data=session.text.data or "the demo corpus",
        join_address=None if swarm is None else pasted_address(session.run, swarm.address),
        fetched_bytes=None if swarm is None else swarm.fetched_bytes,
        directory=str(session.directory),
    )
    tell_plan(engine, events)


def tell_rounds(swarm: Swarm, reports: Sequence[RoundReport], events: EventLog) -> None:
    """Tell how rounds ended for this peer."""
    if not reports:
        return
    held = swarm.state_dict().meta
    names = {peer.peer_id: peer.name for peer in swarm.peers()}
    for report in reports:
        events.emit(
            "round",
            round=report.round,
            fragment=report.fragment,
            version=held["versions"][report.fragment],
            digest=held["digests"][report.fragment],
            outcome=report.outcome,
            contributors=len(report.contributors),
            members=[names.get(key, key[-8:]) for key in report.contributors],
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            duration_s=report.duration_s,
            reason=report.reason,
        )


def tell_timeline(session: Session, events: EventLog) -> None:
    """Tell what each stream did in the last step, which was recorded; waits for its updates."""
    engine = session.engine
    assert engine.last is not None
    step_s = engine.last.step_s
    start_s = time.time() - step_s
    measured = engine.last_spans()
    predicted = engine.predicted_spans()
    if max(len(measured), len(predicted)) > _MOST_SPANS:
        return
    events.emit(
        "timeline",
        step=session.step,
        start_time_s=start_s,
        step_s=step_s,
        predicted_step_s=engine.plan.step_s,
        measured=[_plain_span(span) for span in measured],
        predicted=[_plain_span(span) for span in predicted],
    )


def trace_last_step(session: Session) -> None:
    """Write what the last step did, beside what was predicted, if that is wanted."""
    engine, path = session.engine, session.options.trace
    if path is None:
        return
    assert engine.last is not None
    accounts = [
        Account("predicted", engine.predicted_spans()),
        Account(f"measured: step {session.step}", engine.last_spans()),
    ]
    about = {
        "model": session.recipe.model,
        "device": engine.device_name,
        "predicted_step_s": engine.plan.step_s,
        "measured_step_s": engine.last.step_s,
    }
    write_trace(path, accounts, about)


def _plain_span(span: Span) -> list[Any]:
    """Return stream, label, start and end in seconds; a microsecond is exact enough to look at."""
    return [span.stream, span.label, round(span.start_s, 6), round(span.end_s, 6)]
