"""Benchmark `outer`: the loss of averaged peers at equal tokens, and with poisoned ones among them.

Small models in one process, averaged by the swarm's own parts (`outer_swarm`):

* peers of a swarm (`local`, 4-bit wire) against one peer with as many times the batch, for rounds
  that are rare and frequent, in runs that are short and long; each side at the learning rate that
  was best for it of the same grid;
* a swarm in which one peer's contributions are poisoned against one in which it is honest.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.swarm.outer_swarm import Averaging, LocalSwarm, Poison, Task, train_alone
from atomtrain.swarm.anchors.updates import OVERLAP_WEIGHTS, outer_named

POISONS: dict[str, Poison] = {
    "sign flipped": lambda values: -values,
    "100 times": lambda values: 100 * values,
    "not a number": lambda values: torch.full_like(values, float("nan")),
    "constant": lambda values: torch.full_like(values, 3.0),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison of both sides, each at the best learning rate of the grid in docs/quality.md."""

    steps: int = 3200
    local_steps: int = 4
    swarm_learning_rate: float = 7e-3
    alone_learning_rate: float = 6e-3
    seeds: int = 1


CASES = (
    Case(seeds=3),
    Case(steps=1600, swarm_learning_rate=12e-3),
    Case(steps=1600, local_steps=20, swarm_learning_rate=12e-3),
    Case(steps=400, swarm_learning_rate=12e-3, alone_learning_rate=9e-3),
    Case(steps=400, local_steps=20, swarm_learning_rate=12e-3, alone_learning_rate=9e-3),
)


@dataclass(frozen=True, kw_only=True)
class OuterSetup:
    """Inputs of the benchmark."""

    task: Task = field(default_factory=Task)
    peers: int = 4
    sequences: int = 8
    """Of each peer's step."""
    cases: tuple[Case, ...] = CASES
    """The first one is what `loss_ratio` is about."""
    fragments: int = 4
    wire: str = "int4"
    outer: str = "nesterov"
    poisoned_peers: int = 8
    """Peers of the swarm in which one is poisoned."""
    poisoned: Case = Case(steps=150, local_steps=20, swarm_learning_rate=3e-3)


QUICK = OuterSetup(
    task=Task(layers=1, width=32, context=32, warmup_steps=5, text_bytes=200_000),
    sequences=4,
    cases=(Case(steps=40), Case(steps=40, local_steps=20)),
    poisoned_peers=4,
    poisoned=Case(steps=20, local_steps=20),
)


def run(options: BenchmarkOptions, setup: OuterSetup | None = None) -> Result:
    """Measure, and return plain JSON values."""
    setup = setup or (QUICK if options.quick else OuterSetup())
    torch.set_num_threads(1)
    text = setup.task.text()
    alone: dict[tuple[int, float, int], float] = {}
    cases = [_compared(setup, case, text, alone) for case in setup.cases]
    poisoned = _poisoned(setup, text)
    return {
        **{key: cases[0][key] for key in ("rows", "swarm_loss", "alone_loss", "loss_ratio")},
        "cases": cases,
        "poisoned": poisoned,
        "worst_poisoned_ratio": max(entry["ratio"] for entry in poisoned),
        "inputs": asdict(setup),
        **description(),
    }


def _compared(
    setup: OuterSetup, case: Case, text: torch.Tensor, alone: dict[tuple[int, float, int], float]
) -> Result:
    """Return both sides' losses; `alone` keeps what a peer alone reached, for the next case."""
    rows: list[Result] = []
    sent_bytes = 0.0
    for seed in range(case.seeds):
        swarm = LocalSwarm(_task(setup, case), _averaging(setup, case), setup.peers, seed)
        together = swarm.train(text, setup.sequences)
        sent_bytes = swarm.sent_bytes
        key = (case.steps, case.alone_learning_rate, seed)
        if key not in alone:
            task = replace(setup.task, steps=key[0], learning_rate=key[1])
            alone[key] = train_alone(task, text, setup.peers * setup.sequences, seed)
        rows.append({"seed": seed, "swarm_loss": together, "alone_loss": alone[key]})
        progress(
            f"{case.steps} steps, averaged every {case.local_steps}, seed {seed}: "
            f"swarm {together:.4f}, one peer with the whole batch {alone[key]:.4f}"
        )
    swarm_loss, alone_loss = (
        statistics.mean(row[side] for row in rows) for side in ("swarm_loss", "alone_loss")
    )
    return {
        "steps": case.steps,
        "local_steps": case.local_steps,
        "swarm_loss": swarm_loss,
        "alone_loss": alone_loss,
        "loss_ratio": swarm_loss / alone_loss,
        "sent_bytes_per_peer_step": sent_bytes / case.steps,
        "rows": rows,
    }


def _poisoned(setup: OuterSetup, text: torch.Tensor) -> list[Result]:
    how = replace(_averaging(setup, setup.poisoned), mean="clipped")

    def loss(poison: Poison | None) -> float:
        task = _task(setup, setup.poisoned)
        swarm = LocalSwarm(task, how, setup.poisoned_peers, 0, poison)
        return swarm.train(text, setup.sequences)

    honest = loss(None)
    found: list[Result] = []
    for name, poison in POISONS.items():
        reached = loss(poison)
        found.append({"poison": name, "loss": reached, "ratio": reached / honest})
        progress(f"one of {setup.poisoned_peers} poisoned ({name}): {reached:.4f} to {honest:.4f}")
    return found


def _task(setup: OuterSetup, case: Case) -> Task:
    return replace(setup.task, steps=case.steps, learning_rate=case.swarm_learning_rate)


def _averaging(setup: OuterSetup, case: Case) -> Averaging:
    return Averaging(
        outer=outer_named(setup.outer, case.local_steps, setup.fragments),
        local_steps=case.local_steps,
        fragments=setup.fragments,
        wire=setup.wire,
        overlap_weight=OVERLAP_WEIGHTS[setup.outer],
    )
