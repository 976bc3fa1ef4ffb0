"""`python -m atomresearch.planner`: how far a plainer search is from the planner's.

Prints one JSON object: for plans of the catalogue and for random small chains, by how much the
plans that `coordinates.py` finds are slower than the planner's, and what both searches take.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from atomresearch.planner.coordinates import CoordinateSearch
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.errors import AtomError
from atomtrain.models.gpt import GPT
from atomtrain.models.gpt_config import GPT3, preset
from atomtrain.planning.catalogue import HOSTS, gpu, machine_for
from atomtrain.planning.cost.costing import Given
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.search.batch_search import Workload, prospect
from atomtrain.planning.search.choice import fastest_of
from atomtrain.planning.search.memory_limit import least_device_bytes
from atomtrain.planning.search.problem import problems_of
from atomtrain.planning.search.space import Space
from atomtrain.views.plans.subject import Subject, compute_of, subject

_CARDS = ("gtx-1080-ti", "rtx-3090", "rtx-4090", "h100")
_PRECISIONS = ("fp32", "bf16")
_CHAINS = 200
_NEAR = 1.01
"""A plan that is no slower than this would do in the place of the planner's."""
_STATE_BYTES = 16
_QUICK_MODELS, _QUICK_CHAINS = GPT3[:2], 20


class Case(NamedTuple):
    name: str
    space: Space
    device_bytes: int


class Compared(NamedTuple):
    name: str
    ratio: float
    """Seconds of the step that coordinates find over those of the fastest."""
    planner_s: float
    coordinates_s: float


def compared(case: Case) -> Compared | None:
    """Search both ways; `None` where nothing fits."""
    begun_s = time.process_time()
    exact = fastest_of(case.space, case.device_bytes)
    planner_s = time.process_time() - begun_s
    if exact is None:
        return None
    begun_s = time.process_time()
    found = CoordinateSearch(case.space, case.device_bytes).best()
    coordinates_s = time.process_time() - begun_s
    ratio = float("inf") if found is None else found.step_s / exact.step_s
    return Compared(case.name, ratio, planner_s, coordinates_s)


def catalogue(models: Sequence[str]) -> Iterator[Case]:
    """Yield the GPT-3 family on some GPUs: weights in float32, each precision's rate of compute."""
    for name in models:
        model = subject(name)
        for card_name in _CARDS:
            card = gpu(card_name)
            needed = int(1.1 * _STATE_BYTES * model.parameters)
            host_bytes = max(HOSTS[card.host].most_memory_bytes, 1 << (needed - 1).bit_length())
            for dtype in _PRECISIONS:
                workload = Workload(context_tokens=model.context_tokens, clips=True)
                machine = machine_for(card, host_bytes)
                try:
                    compute = compute_of(card, dtype)
                    analyse = functools.partial(model.analyse, on_gpu=True)
                    found = prospect(analyse, compute, machine, workload)
                except AtomError:  # it does not fit, or the card lacks the precision
                    continue
                analysis = found.analysis
                request = Request(
                    micro_batches=found.plan.micro_batches, updates=analysis.updates, clips=True,
                    host_layers=0,
                )  # fmt: skip
                given = Given(
                    chain=analysis.chain, costs=analysis.costs, times=found.times, machine=machine
                )
                [problem] = problems_of(given, request)[:1]
                case = f"{name} {card_name} {dtype}"
                yield Case(case, problem.space, machine.device_memory_bytes)


def chains(count: int) -> Iterator[Case]:
    """Yield random small chains on random machines: those of a small GPT, where what each layer
    takes in time, and saves, is drawn for each alone."""
    source = random.Random(0)
    models = []
    for blocks in (2, 3, 4):
        with torch.device("meta"):
            model = GPT(dataclasses.replace(preset("tiny"), layers=blocks))
        models.append(Subject(f"{blocks} blocks", 64, model).analyse(1))
    for index in range(count):
        analysis = source.choice(models)
        layers, times = [], {}
        for number, cost in enumerate(analysis.costs.layers):
            share = source.choice((0.0, 0.5, 1.0, 2.0))
            saved = cost.saved._replace(
                inner_bytes=int(share * cost.saved.inner_bytes),
                sent_bytes=int(share * cost.saved.sent_bytes),
            )
            layers.append(dataclasses.replace(cost, kind=str(number), saved=saved, all_sent=None))
            times[str(number)] = LayerTime(source.uniform(0.01, 1.0), source.uniform(0.01, 4.0))
        given = Given(
            chain=analysis.chain, costs=analysis.costs._replace(layers=tuple(layers)), times=times,
            machine=_machine(source),
        )  # fmt: skip
        request = Request(
            micro_batches=source.randint(1, 3), clips=source.random() < 0.5, host_layers=0
        )
        [problem] = problems_of(given, request)[:1]
        least = least_device_bytes(problem.space)
        yield Case(f"chain {index}", problem.space, int(least * source.uniform(1.0, 2.5)))


def _machine(source: random.Random) -> Machine:
    """Return a machine on which a small chain computes about as long as it moves."""
    return Machine(
        name="random",
        load_bytes_per_s=10 ** source.uniform(4.5, 6.5),
        unload_bytes_per_s=10 ** source.uniform(4.5, 6.5),
        update_parameters_per_s=10 ** source.uniform(4.0, 6.0),
        device_update_parameters_per_s=10 ** source.uniform(4.5, 6.5),
        device_memory_bytes=1 << 40,
        host_memory_bytes=1 << 40,
    )


def summary(cases: Iterator[Case]) -> dict[str, Any]:
    """Return by how much coordinates miss, and what both searches take; the five worst by name."""
    rows = [row for case in cases if (row := compared(case)) is not None]
    worst = sorted(rows, key=lambda row: -row.ratio)
    return {
        "cases": len(rows),
        "worst_ratio": worst[0].ratio,
        "within_1_percent": sum(row.ratio <= _NEAR for row in rows) / len(rows),
        "planner_s": sum(row.planner_s for row in rows),
        "coordinates_s": sum(row.coordinates_s for row in rows),
        "median_time_ratio": statistics.median(r.coordinates_s / r.planner_s for r in rows),
        "worst": [{"name": row.name, "ratio": row.ratio} for row in worst[:5]],
    }


def main(arguments: Sequence[str]) -> int:
    quick = "--quick" in arguments
    sets = {
        "catalogue": catalogue(_QUICK_MODELS if quick else GPT3),
        "chains": chains(_QUICK_CHAINS if quick else _CHAINS),
    }
    sys.stdout.write(json.dumps({name: summary(cases) for name, cases in sets.items()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
