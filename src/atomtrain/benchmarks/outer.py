"""Benchmark `outer`: the loss of averaged peers at equal tokens, and with poisoned ones among them.

Small models in one process, averaged by the swarm's own parts (`outer_swarm`):

* peers of a swarm (`local`, 4-bit wire) against one peer with as many times the batch;
* a swarm in which one peer's contributions are poisoned against one in which it is honest.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field

import torch

from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.benchmarks.outer_swarm import Averaging, LocalSwarm, Poison, Task, train_alone
from atomtrain.swarm.outer import OVERLAP_WEIGHTS, outer_named

POISONS: dict[str, Poison] = {
    "sign flipped": lambda values: -values,
    "100 times": lambda values: 100 * values,
    "not a number": lambda values: torch.full_like(values, float("nan")),
    "constant": lambda values: torch.full_like(values, 3.0),
}


@dataclass(frozen=True, kw_only=True)
class OuterSetup:
    """Inputs of the benchmark."""

    task: Task = field(default_factory=Task)
    peers: int = 4
    sequences: int = 8
    """Of each peer's step."""
    local_steps: int = 20
    fragments: int = 4
    wire: str = "int4"
    outer: str = "nesterov"
    seeds: int = 3
    poisoned_peers: int = 8
    """Peers of the swarm in which one is poisoned."""
    poisoned_steps: int = 150


QUICK = OuterSetup(
    task=Task(layers=1, width=32, context=32, steps=40, warmup_steps=5, text_bytes=200_000),
    sequences=4,
    seeds=1,
    poisoned_peers=4,
    poisoned_steps=20,
)


def run(options: BenchmarkOptions, setup: OuterSetup | None = None) -> Result:
    """Measure, and return plain JSON values."""
    setup = setup or (QUICK if options.quick else OuterSetup())
    torch.set_num_threads(1)
    text = setup.task.text()
    rows = [_row(setup, text, seed) for seed in range(setup.seeds)]
    poisoned = _poisoned(setup, text)
    together, alone = ([row[i] for row in rows] for i in (0, 1))
    return {
        "rows": [{"seed": s, "swarm_loss": a, "alone_loss": b} for s, (a, b) in enumerate(rows)],
        "swarm_loss": statistics.mean(together),
        "alone_loss": statistics.mean(alone),
        "loss_ratio": statistics.mean(together) / statistics.mean(alone),
        "poisoned": poisoned,
        "worst_poisoned_ratio": max(entry["ratio"] for entry in poisoned),
        "inputs": asdict(setup),
        **description(),
    }


def _row(setup: OuterSetup, text: torch.Tensor, seed: int) -> tuple[float, float]:
    swarm = LocalSwarm(setup.task, _averaging(setup), setup.peers, seed)
    together = swarm.train(text, setup.sequences)
    alone = train_alone(setup.task, text, setup.peers * setup.sequences, seed)
    progress(f"seed {seed}: swarm {together:.4f}, one peer with the whole batch {alone:.4f}")
    return together, alone


def _poisoned(setup: OuterSetup, text: torch.Tensor) -> list[Result]:
    task = Task(**{**asdict(setup.task), "steps": setup.poisoned_steps})
    how = Averaging(**{**vars(_averaging(setup)), "mean": "clipped"})

    def loss(poison: Poison | None) -> float:
        swarm = LocalSwarm(task, how, setup.poisoned_peers, 0, poison)
        return swarm.train(text, setup.sequences)

    honest = loss(None)
    found: list[Result] = []
    for name, poison in POISONS.items():
        reached = loss(poison)
        found.append({"poison": name, "loss": reached, "ratio": reached / honest})
        progress(f"one of {setup.poisoned_peers} poisoned ({name}): {reached:.4f} to {honest:.4f}")
    return found


def _averaging(setup: OuterSetup) -> Averaging:
    return Averaging(
        outer=outer_named(setup.outer, setup.local_steps, setup.fragments),
        local_steps=setup.local_steps,
        fragments=setup.fragments,
        wire=setup.wire,
        overlap_weight=OVERLAP_WEIGHTS[setup.outer],
    )
