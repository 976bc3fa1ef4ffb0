"""The training loop of one peer: batch, step, round, log, evaluate, checkpoint."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from atomtrain.data.sampler import joined
from atomtrain.engine.calibration.profile_cache import StepTimes
from atomtrain.engine.engine_base import StepReport
from atomtrain.engine.replanning import Replanning
from atomtrain.errors import DiskError, StreamError
from atomtrain.events import EVENTS_FILE, PICTURE_FILE, EventLog
from atomtrain.optimizers.groups import set_learning_rate
from atomtrain.training.run_events import (
    SwarmFile,
    announce,
    newest,
    plan_again,
    save_session,
    seed_of,
    tell_expelled,
    tell_rounds,
    tell_samples,
    trace_last_step,
)
from atomtrain.training.setup.gradients import GradientFragments
from atomtrain.training.setup.setup import Session
from atomtrain.views.runs.picture import loss_picture
from atomtrain.views.runs.plan_event import measured_of, tell_prediction, tell_timeline

_GLANCE_SEQUENCES = 16
"""Held-out sequences of an evaluation during training; the one at the end takes more, unless it is
to be compared with one at the start."""
_FINAL_SEQUENCES = 64
_MOST_LOSS = 700.0
"""Beyond it a perplexity is no number any more."""
_SLOW_STEPS = 2
"""The first steps of a run, which make what later ones find: they say little of the time left."""
_WAIT_S = 0.002
_LEAVE_S = 20.0


class Pace:
    """Reckons the time left from the steps that a run has made, without its slow first ones."""

    def __init__(self, step: int, now_s: float) -> None:
        """`step` is the last one that is done, `now_s` a time on any clock."""
        self._first = step
        self._since, self._since_s = step, now_s

    def left_s(self, step: int, steps: int, now_s: float) -> float:
        """Return the seconds from `step` to `steps`; call it after each step."""
        # Peers that step together may go back, all at once, if a step has done harm.
        done = max(1, step - self._since)
        left_s = (now_s - self._since_s) / done * (steps - step)
        if self._since == self._first and step - self._first >= _SLOW_STEPS:
            self._since, self._since_s = step, now_s
        return left_s


class Loop:
    """Trains a session to its end, or until it is asked to stop."""

    def __init__(self, session: Session, events: EventLog) -> None:
        self._session, self._events = session, events
        self._stop = False
        self._started_s = time.monotonic()
        self._first_step = session.step
        self._pace = Pace(session.step, self._started_s)
        self._times = StepTimes()
        self._replanning = Replanning()
        self._told_step = 0
        self._shown = False
        self._members: dict[str, str] = {}
        self._expelled: set[str] = set()
        self._swarm_file = SwarmFile(session.directory)
        self._saved_step: int | None = None
        self._numbers: dict[str, float] = {}
        self._last: tuple[float | None, float | None] = (None, None)

    def run(self) -> str:
        """Train; return `completed` or `interrupted`."""
        session, recipe = self._session, self._session.recipe
        announce(session, self._events)
        self._warn_of_buffers()
        with self._interruptible():
            if session.fine_tunes and session.step == 0:
                self._evaluate(_GLANCE_SEQUENCES)  # where it starts from
            while session.step < recipe.steps and not self._stop:
                before = session.step
                batch = self._batch()
                if plan_again(session, self._replanning, batch, self._events):
                    self._times = StepTimes()  # what comes is compared with what is predicted now
                loss = self._train_or_save(batch)
                rounds = self._average()
                if session.step == before:
                    continue  # gradients are still being gathered
                self._log(loss, rounds)
                if self._shown:
                    tell_timeline(session.engine, session.step, self._events)
                if self._due(recipe.evaluate_every, before, session.step):
                    self._evaluate(_GLANCE_SEQUENCES)
                if self._due(recipe.checkpoint_every, before, session.step):
                    self._checkpoint()
            if self._stop:
                return self._finish("interrupted")
            self._settle()
            return self._finish("completed")

    def _warn_of_buffers(self) -> None:
        """Say it if reads and writes of state on disk cannot go past the page cache."""
        disk = self._session.engine.disk
        if disk is not None and not disk.direct:
            self._events.emit(
                "warning",
                message=f"the file system of {self._session.options.disk} refuses direct reads and "
                "writes; they go through the page cache",
            )

    def _batch(self) -> list[dict[str, torch.Tensor]]:
        session = self._session
        batch = session.sampler.batch(self._position)
        return session.objective.micro_batches(batch, session.fit.micro_batch)

    def _train(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        session = self._session
        rate = session.recipe.learning_rate_at(session.step)
        set_learning_rate(session.engine.optimizer.param_groups, rate)
        # A pure function of run, peer and step, so that resuming needs no generator's state.
        torch.manual_seed(seed_of(session.recipe.seed, session.name, self._position))
        self._shown = self._is_shown()
        session.engine.recording = session.options.trace is not None or self._shown
        with session.objective.listening() as heard:
            loss = session.engine.step(micro_batches)
        self._numbers = session.objective.numbers(heard, micro_batches)
        if isinstance(session.fragments, GradientFragments):
            session.fragments.note_step()
            session.step += session.swarm is None
        else:
            session.step += 1
        session.tokens += session.recipe.tokens_per_step
        return loss

    @property
    def _position(self) -> int:
        """Index of the next batch among this peer's."""
        session = self._session
        if isinstance(session.fragments, GradientFragments):  # several make a step
            return session.tokens // session.recipe.tokens_per_step
        return session.step

    def _train_or_save(self, micro_batches: list[dict[str, torch.Tensor]]) -> float:
        """Train a step; if the disk below host memory refuses to go on, save what there is."""
        session = self._session
        try:
            return self._train(micro_batches)
        except DiskError as error:
            try:
                session.engine.synchronize()
            except StreamError:
                raise error from None  # it failed to read: part of the state is lost
            path = newest(session) if self._saved_step == session.step else self._checkpoint()
            raise DiskError(
                f"{error}; everything up to step {session.step} is in {path}: go on with --resume"
            ) from error

    def _average(self) -> int | None:
        """Cross the boundary between two steps; return the last round that ended here."""
        session = self._session
        if session.swarm is None:
            return None
        step_s = self._report().step_s
        tokens = session.recipe.tokens_per_step
        # A newcomer or a resumed peer tells at first how far it is: whoever joins through it goes
        # on from there.
        steps, self._told_step = session.step - self._told_step, session.step
        together = isinstance(session.fragments, GradientFragments)
        reports = session.swarm.boundary(
            steps=1 if together else steps,
            tokens=tokens,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            access=session.fragments,
        )
        while together and session.swarm.awaited and not self._stop:
            # This peer's part is given; what it learnt meanwhile would be of old parameters.
            if not session.swarm.wait(_WAIT_S):
                continue
            reports += session.swarm.boundary(
                steps=0,
                tokens=0,
                tokens_per_s=tokens / step_s,
                step_s=step_s,
                access=session.fragments,
            )
        if together:
            session.step = session.swarm.version
        tell_rounds(session.swarm, reports, self._events)
        self._watch_members()
        return session.swarm.progress().round

    def _settle(self) -> None:
        """End on what all peers have learnt: parameters become those that the swarm agrees on."""
        session = self._session
        if session.swarm is None or isinstance(session.fragments, GradientFragments):
            return
        reports = session.swarm.settle(session.fragments, lambda: self._stop)
        tell_rounds(session.swarm, reports, self._events)

    def _end_rounds(self) -> None:
        """End the round under way and enter no other: nobody waits for a peer that saves."""
        session = self._session
        if session.swarm is None:
            return
        reports = session.swarm.finish(session.fragments, _LEAVE_S)
        if isinstance(session.fragments, GradientFragments):
            session.step = session.swarm.version
        tell_rounds(session.swarm, reports, self._events)

    def _watch_members(self) -> None:
        assert self._session.swarm is not None
        now = {
            peer.peer_id: peer.name
            for peer in self._session.swarm.peers()
            if not peer.is_self and peer.state == "training" and peer.reachable
        }
        joined = [name for key, name in now.items() if key not in self._members]
        left = [name for key, name in self._members.items() if key not in now]
        if joined or left:
            self._events.emit("membership", peers=len(now) + 1, joined=joined, left=left)
        self._members = now
        tell_expelled(self._session.swarm, self._expelled, self._events)
        self._swarm_file.update(self._session.swarm.peers)

    def _is_shown(self) -> bool:
        """Whether views get to see what each stream does in the coming step.

        An evaluation waits for the step's updates anyway, so that step's spans cost nothing; the
        second step comes first, so that there is something to see early.
        """
        session = self._session
        before, coming = session.step, session.step + 1
        evaluated = self._due(session.recipe.evaluate_every, before, coming)
        return evaluated or coming == self._first_step + 2

    def _log(self, loss: float, rounds: int | None) -> None:
        session, report = self._session, self._report()
        recipe, engine = session.recipe, session.engine
        self._last = (loss, self._last[1])
        self._times.note(report.step_s)
        self._events.emit(
            "step",
            step=session.step,
            steps=recipe.steps,
            loss=loss,
            **self._numbers,
            tokens=recipe.tokens_per_step,
            tokens_total=session.tokens,
            tokens_per_s=recipe.tokens_per_step / report.step_s,
            **measured_of(engine),
            learning_rate=recipe.learning_rate_at(session.step - 1),
            peers=len(self._members) + 1,
            round=rounds,
            time_left_s=self._pace.left_s(session.step, recipe.steps, time.monotonic()),
        )

    def _evaluate(self, sequences: int) -> None:
        session = self._session
        material, context = session.text.material, session.recipe.context
        size = session.fit.micro_batch
        found = list(material.held_out(context, size, max(1, sequences // size)))
        # As one batch, so that every target counts alike.
        batches = session.objective.micro_batches(joined(found), size)
        with session.objective.listening() as heard:
            loss = session.engine.evaluate(batches)
        numbers = session.objective.numbers(heard, batches)
        bits = material.bits_per_byte(context, loss)
        if bits is not None:
            perplexity = math.exp(min(loss, _MOST_LOSS))
            numbers = {**numbers, "perplexity": perplexity, "bits_per_byte": bits}
        self._last = (self._last[0], bits)
        self._events.emit("evaluation", step=session.step, loss=loss, **numbers)

    def _checkpoint(self) -> Path:
        path = save_session(self._session, self._events)
        self._saved_step = self._session.step
        return path

    def _finish(self, reason: str) -> str:
        session = self._session
        self._end_rounds()
        if session.step > self._first_step:
            trace_last_step(session)
        if reason == "completed":
            self._evaluate(_GLANCE_SEQUENCES if session.fine_tunes else _FINAL_SEQUENCES)
        path = newest(session) if self._saved_step == session.step else self._checkpoint()
        picture = None
        if session.step > self._first_step:
            picture = loss_picture(
                {session.name: session.directory / EVENTS_FILE}, session.directory / PICTURE_FILE
            )
        if session.swarm is not None:
            session.swarm.leave(_LEAVE_S)
        if reason == "completed" and session.recipe.says_text:
            tell_samples(session, self._events)
        tell_prediction(session.engine, self._times, self._events)
        self._events.emit(
            "run_finished",
            reason=reason,
            step=session.step,
            loss=self._last[0],
            bits_per_byte=self._last[1],
            checkpoint=str(path),
            picture=None if picture is None else str(picture),
            duration_s=time.monotonic() - self._started_s,
        )
        return reason

    def _due(self, every: int, before: int, step: int) -> bool:
        """Whether what comes every so many steps is due at `step`; `_finish` does it at the end.

        Steps that peers take together may pass several at once.
        """
        return before // every < step // every and step < self._session.recipe.steps

    def _report(self) -> StepReport:
        report = self._session.engine.last
        assert report is not None
        return report

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first SIGINT or SIGTERM finish the step and save; the next one acts at once."""

        def ask(_number: int, _: FrameType | None) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Said now, as a step may be long, and not from here: this thread may hold the locks
            # of the log or of the display.
            threading.Thread(target=self._events.emit, args=("stopping",), daemon=True).start()

        before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
