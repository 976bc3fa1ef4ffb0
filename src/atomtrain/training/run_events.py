"""What a run tells of itself beside its steps: how it begins, rounds, a trace of its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atomtrain.engine.devices.native import tf32_hint
from atomtrain.events import EventLog
from atomtrain.models.making import parameter_count
from atomtrain.training.setup.setup import Session
from atomtrain.training.together.peering import pasted_address
from atomtrain.views.plans.trace import Account, write_trace
from atomtrain.views.runs.plan_event import tell_plan

if TYPE_CHECKING:
    from atomtrain.swarm import RoundReport, Swarm


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
        precision=session.recipe.precision,
        parameters=parameter_count(session.model),
        state_bytes=engine.state_bytes,
        steps=session.recipe.steps,
        tokens_per_step=session.recipe.tokens_per_step,
        data=session.text.data or "the demo corpus",
        join_address=None if swarm is None else pasted_address(session.run, swarm.address),
        fetched_bytes=None if swarm is None else swarm.fetched_bytes,
        directory=str(session.directory),
    )
    if session.text.skipped is not None:
        skipped = session.text.skipped_rows
        events.emit("warning", message=session.text.skipped, skipped_rows=skipped)
    if hint := tf32_hint(engine.device, session.recipe.precision):
        events.emit("warning", message=hint)
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
