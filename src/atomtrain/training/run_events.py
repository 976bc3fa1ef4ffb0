"""What a run tells and writes beside its steps: beginning, peers, rounds, samples, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atomtrain.checkpoint import save
from atomtrain.engine.devices.native import tf32_hint
from atomtrain.engine.generation.generating import Wish
from atomtrain.engine.replanning import Replanning
from atomtrain.errors import DeviceMemoryError, PlanError
from atomtrain.events import SWARM_FILE, EventLog
from atomtrain.files import replacing
from atomtrain.models.making import parameter_count
from atomtrain.progress import listening
from atomtrain.training.config.preflight import CHECKPOINTS
from atomtrain.training.setup.peering import pasted_address
from atomtrain.training.setup.setup import Session
from atomtrain.training.setup.sources import guards_of
from atomtrain.training.setup.state import (
    SWARM_SHARD,
    compiling_of,
    loss_scale_of,
    shards_of,
)
from atomtrain.views.plans.step import Account, write_trace
from atomtrain.views.runs.plan_event import tell_checkpoint, tell_plan, tell_planned_again

if TYPE_CHECKING:
    from atomtrain.swarm import RoundReport, Swarm
    from atomtrain.swarm.membership.records import PeerStatus


def announce(session: Session, events: EventLog) -> None:
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
        data=session.text.named,
        join_address=None if swarm is None else pasted_address(session.run, swarm.address),
        fetched_bytes=None if swarm is None else swarm.fetched_bytes,
        directory=str(session.directory),
    )
    if (laid := session.sampler.laid) is not None:
        events.emit(
            "data",
            rows=laid.rows,
            sequences=laid.sequences,
            cut_rows=laid.cut,
            dropped_rows=laid.dropped,
            context_tokens=session.recipe.context,
            filled_share=laid.filled_share,
            packed=session.recipe.packed,
        )
    if session.text.skipped is not None:
        skipped = session.text.skipped_rows
        events.emit("warning", message=session.text.skipped, skipped_rows=skipped)
    if hint := tf32_hint(engine.device, session.recipe.precision):
        events.emit("warning", message=hint)
    tell_plan(engine, events, session.options.compile)


def plan_again(
    session: Session,
    replanning: Replanning,
    micro_batches: Sequence[dict[str, torch.Tensor]],
    events: EventLog,
) -> bool:
    """Measure and plan again if the machine was crowded and is not now; tell, and return, if so."""
    try:
        again = replanning.between_steps(session.engine, micro_batches)
    except PlanError as error:  # of measuring: the run goes on as before
        events.emit("warning", message=f"the plan stays: {error}")
        return False
    if again is None:
        return False
    tell_planned_again(session.engine, again, events)
    tell_plan(session.engine, events, session.options.compile)
    return True


def tell_rounds(swarm: Swarm, reports: Sequence[RoundReport], events: EventLog) -> None:
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
            peer_ids=list(report.contributors),
            weights=list(report.weights),
            rejected=list(report.rejected),
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            duration_s=report.duration_s,
            reason=report.reason,
        )


def tell_expelled(swarm: Swarm, told: set[str], events: EventLog) -> None:
    """Tell whom this peer counts as gone for good, and why; `told` has those that were told of."""
    new = {key: why for key, why in swarm.expelled().items() if key not in told}
    if not new:
        return
    names = {peer.peer_id: peer.name for peer in swarm.peers()}
    for key, why in new.items():
        told.add(key)
        events.emit("expelled", peer_id=key, name=names.get(key, key[-8:]), reason=why)


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


_TOKENS = 60
_SAMPLE_S = 20.0
_SAMPLES = 3


def tell_samples(session: Session, events: EventLog) -> None:
    """Generate a few sentences; stops soon after twenty seconds.

    On the run's device; on the host where the device is too small for that.
    """
    engine, tokenizer, prompt = session.engine, session.text.tokenizer, session.options.prompt
    # Peers that end together have one and the same model: let each say something else.
    seeds = [seed_of(session.recipe.seed, session.name, f"sample {n}") for n in range(_SAMPLES)]
    wish = Wish(
        max_new_tokens=_TOKENS,
        seed=seeds,
        stop=(tokenizer.separator,),
        context=session.recipe.sizes.context or session.recipe.context,
        max_s=_SAMPLE_S,
    )
    ids = [tokenizer.encode(prompt) or [tokenizer.separator]] * _SAMPLES
    with listening(lambda _: None):  # the display is at work
        try:
            found = engine.generate(ids, **wish._asdict())
        except (PlanError, DeviceMemoryError) as error:
            events.emit("warning", message=f"samples are generated on the host: {error}")
            found = engine.generate(ids, on_host=True, **wish._asdict())
    for tokens in found.tokens:
        text = tokenizer.decode(tokens)
        events.emit("sample", step=session.step, prompt=prompt, text=text)


def seed_of(run_seed: int, peer: str, what: object) -> int:
    """Return the seed of what one peer draws, such as a step's dropout: a pure function of all."""
    key = f"{run_seed}/{peer}/{what}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


_INTERVAL_S = 0.8
_MOST_SHARE = 0.01
"""Of the time may go into writing, also in a swarm of thousands."""


class SwarmFile:
    """Writes the table of peers into a peer's folder, not too often."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / SWARM_FILE
        self._clock = clock
        self._due_s = 0.0

    def update(self, peers: Callable[[], Sequence[PeerStatus]]) -> bool:
        """Write what `peers` returns if it is time to; return whether it was.

        A disk that is full costs views the table, not the run.
        """
        now_s = self._clock()
        if now_s < self._due_s:
            return False
        table = {"time_s": time.time(), "peers": [dataclasses.asdict(peer) for peer in peers()]}
        with contextlib.suppress(OSError), replacing(self._path) as temporary:
            temporary.write_text(json.dumps(table), encoding="utf-8")
        took_s = self._clock() - now_s
        self._due_s = now_s + max(_INTERVAL_S, took_s / _MOST_SHARE)
        return True


def save_session(session: Session, events: EventLog) -> Path:
    """Write a checkpoint of the session as it is now, and tell of it; return its folder.

    Waits for the last step's updates.
    """
    started_s, folder = time.monotonic(), session.model_folder
    meta: dict[str, Any] = {
        "recipe": session.recipe.to_json(),
        "separator": session.text.tokenizer.separator_text,
        "tokens": session.tokens,
        "micro_batch": session.fit.micro_batch,
        "head_pieces": session.fit.head_pieces,
        "loss_scale": loss_scale_of(session.engine),
        "compiling": compiling_of(session.engine),
        "plan": session.engine.kept_plan(),
        "data": list(session.text.data),
        "validation": session.text.validation,
        "model_folder": None if folder is None else str(folder.absolute()),
        "text_sha256": session.text.sha256,
        "run": session.run,
        "guards": guards_of(session.options),
        "name": session.name,
    }
    swarm = None if session.swarm is None else session.swarm.state_dict()
    if swarm is not None:
        meta["swarm"] = swarm.meta

    def shards() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        yield from shards_of(session.engine)
        if swarm is not None:
            yield SWARM_SHARD, swarm.tensors

    texts = {"tokenizer.json": session.text.tokenizer.to_json()}
    path = save(session.directory / CHECKPOINTS, session.step, shards(), meta, texts)
    tell_checkpoint(path, session.step, time.monotonic() - started_s, events)
    return path


def newest(session: Session) -> Path:
    """Return the checkpoint that was written at the session's step."""
    folder = session.directory / CHECKPOINTS
    return max(folder.glob(f"step-{session.step:08d}*"))
