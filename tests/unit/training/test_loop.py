"""One step of the loop: its learning rate, and the random numbers that it draws."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.events import Event, EventLog
from atomtrain.training.loop import Loop, Pace
from atomtrain.training.setup.gradients import GradientFragments


class Steps:
    """Stands in for an engine: notes what each step begins with."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0}])
        self.seen: list[tuple[int, list[float]]] = []

    def step(self, micro_batches: Any) -> float:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.seen.append((torch.initial_seed(), rates))
        return 1.0


class Objective:
    """Hears nothing."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        yield

    def numbers(self, heard: Any, micro_batches: Any) -> dict[str, float]:
        return {}


def steps(folder: Path, first: int, count: int, name: str = "peer-0", seed: int = 1) -> Any:
    """Return the seed and the rates of each step of a run that begins at step `first`."""
    engine = Steps()
    recipe = SimpleNamespace(
        seed=seed, steps=100, evaluate_every=50, tokens_per_step=8,
        learning_rate_at=lambda step: 0.5**step,
    )  # fmt: skip
    session: Any = SimpleNamespace(
        engine=engine, recipe=recipe, name=name, step=first, tokens=8 * first, directory=folder,
        options=SimpleNamespace(trace=None), objective=Objective(), swarm=None, fragments=None,
    )  # fmt: skip
    loop = Loop(session, SimpleNamespace())  # type: ignore[arg-type]
    with torch.random.fork_rng([]):
        for _ in range(count):
            loop._train([])
    return engine.seen


def test_each_step_has_its_own_rate_and_random_numbers(tmp_path: Path) -> None:
    seen = steps(tmp_path, 0, 4)
    assert [rates for _, rates in seen] == [[0.5**step] * 2 for step in range(4)]
    assert len({seed for seed, _ in seen}) == 4
    assert steps(tmp_path, 2, 2) == seen[2:], "a resumed run goes on where it was"
    for other in (steps(tmp_path, 0, 4, name="peer-1"), steps(tmp_path, 0, 4, seed=2)):
        assert not {seed for seed, _ in other} & {seed for seed, _ in seen}


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_told_and_the_next_of_either_kind_acts_at_once(
    tmp_path: Path, first: signal.Signals
) -> None:
    events, told = EventLog(), threading.Event()
    session: Any = SimpleNamespace(step=0, directory=tmp_path)
    loop = Loop(session, events)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def listen(event: Event) -> None:
        if event["event"] == "step":
            signal.raise_signal(first)  # while this thread holds the log's lock
        elif event["event"] == "stopping":
            told.set()

    events.subscribe(listen)
    with loop._interruptible():
        events.emit("step")
        assert loop._stop
        assert told.wait(60.0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


class Gradients(GradientFragments):
    """Fragments of no engine, that count the steps whose gradients they hold."""

    def __init__(self) -> None:
        self.noted = 0

    def note_step(self) -> None:
        self.noted += 1


def test_several_batches_make_one_step_of_gradients(tmp_path: Path) -> None:
    """Each with random numbers of its own, at the rate of the step that they make together."""
    engine, fragments = Steps(), Gradients()
    recipe = SimpleNamespace(
        seed=1, steps=100, evaluate_every=50, tokens_per_step=8,
        learning_rate_at=lambda step: 0.5**step,
    )  # fmt: skip
    session: Any = SimpleNamespace(
        engine=engine, recipe=recipe, name="peer-0", step=3, tokens=8 * 9, directory=tmp_path,
        options=SimpleNamespace(trace=None), objective=Objective(), swarm=object(),
        fragments=fragments,
    )  # fmt: skip
    loop = Loop(session, SimpleNamespace())  # type: ignore[arg-type]
    with torch.random.fork_rng([]):
        positions = []
        for _ in range(3):
            positions.append(loop._position)
            loop._train([])
    assert positions == [9, 10, 11]
    assert len({seed for seed, _ in engine.seen}) == 3
    assert [rates for _, rates in engine.seen] == [[0.5**3] * 2] * 3
    assert (session.step, fragments.noted) == (3, 3), "a round makes the step"
    session.swarm = None
    with torch.random.fork_rng([]):
        loop._train([])
    assert session.step == 4, "alone, each batch is a step"


class Course(Loop):
    """A run whose steps do nothing; notes what is done after which."""

    def __init__(self, folder: Path, every: int, boundaries: list[int]) -> None:
        recipe = SimpleNamespace(steps=boundaries[-1], evaluate_every=every, checkpoint_every=every)
        session: Any = SimpleNamespace(
            step=0, recipe=recipe, directory=folder, fine_tunes=False, swarm=None
        )
        super().__init__(session, SimpleNamespace())  # type: ignore[arg-type]
        self._coming = list(boundaries)
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    def _train_or_save(self, micro_batches: Any) -> float:
        self._session.step = self._coming.pop(0)
        return 1.0

    def _evaluate(self, sequences: int) -> None:
        self.evaluated.append(self._session.step)

    def _checkpoint(self) -> Path:
        self.saved.append(self._session.step)
        return self._session.directory

    def _finish(self, reason: str) -> str:
        return reason

    def _batch(self) -> Any:
        return []

    def _warn_of_buffers(self) -> None: ...

    def _log(self, loss: float, rounds: int | None) -> None: ...


@pytest.mark.parametrize(
    ("boundaries", "due"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [3, 6]),
        ([1, 2, 3, 4, 5, 6], [3]),  # the last step is for `_finish`, which does more
        ([1, 2, 2, 3, 3, 4, 7, 8], [3, 7]),  # gradients that several gather; some steps at once
        ([2, 13, 14], [13]),
    ],
)
def test_what_comes_every_third_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundaries: list[int], due: list[int]
) -> None:
    monkeypatch.setattr("atomtrain.training.loop.announce", lambda *_: None)
    monkeypatch.setattr("atomtrain.training.loop.plan_again", lambda *_: False)
    course = Course(tmp_path, 3, boundaries)
    assert course.run() == "completed"
    assert (course.evaluated, course.saved) == (due, due)


def test_the_time_left_does_not_count_the_slow_first_steps() -> None:
    pace = Pace(10, now_s=100.0)
    assert pace.left_s(11, 20, 130.0) == 30.0 * 9
    assert pace.left_s(12, 20, 134.0) == 17.0 * 8
    assert pace.left_s(13, 20, 136.0) == 2.0 * 7
    assert pace.left_s(16, 20, 142.0) == 2.0 * 4
    assert pace.left_s(20, 20, 150.0) == 0.0
