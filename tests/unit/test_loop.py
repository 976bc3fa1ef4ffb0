"""One step of the loop: its learning rate, and the random numbers that it draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from atomtrain.training.gradients import GradientFragments
from atomtrain.training.loop import Loop


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
