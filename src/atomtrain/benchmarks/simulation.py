"""ATOM and the best pipeline, simulated: models x links x peers (`docs/scale.md` shows the table).

Nothing is measured but the time that the simulation itself takes: step times come from the planner
and data sheets, and `docs/network.md` says what both sides are granted. `network` measures.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.cli.simulate import SimulateOptions, prospect_of
from atomtrain.cli.simulate_fleet import fleet_rows
from atomtrain.errors import PlanError
from atomtrain.simulation.compare import compare
from atomtrain.simulation.site import site_of


class NamedLink(NamedTuple):
    """A rate that a peer's link really carries, each way."""

    name: str
    bits_per_s: float


LINKS = (
    NamedLink("10 Gbit/s, of which activations reached 610 Mbit/s", 610e6),
    NamedLink("1 Gbit/s", 1e9),
    NamedLink("300 Mbit/s", 300e6),
    NamedLink("100 Mbit/s", 100e6),
    NamedLink("30 Mbit/s", 30e6),
)
"""The first is what the ATOM paper (arXiv 2403.10504) reports of its 10 Gbit/s network."""
MODELS = (
    "gpt3-small",
    "gpt3-medium",
    "gpt3-large",
    "gpt3-xl",
    "gpt3-2.7b",
    "gpt3-6.7b",
    "gpt3-13b",
    "gpt3-175b",
)
PEERS = (4, 8, 16, 64)
_GPU = "rtx-3090"
_HOST = {"gpt3-13b": "256GiB", "gpt3-175b": "4TiB"}
"""Hosts with more memory than usual, where the model needs it."""
_ROUND_TRIP_S = 0.03
_FLEET: dict[str, Any] = {"model": "gpt3-xl", "peers": 10_000, "wire": "int4", "group": 32}
_FLEET_ROUNDS = 1000


def run(options: BenchmarkOptions) -> Result:
    """Simulate every combination; `rows` holds them, `fleet` one run of a very large swarm."""
    models = MODELS[:2] if options.quick else MODELS
    rows: list[Result] = []
    for model in models:
        started_s = time.monotonic()
        rows += _rows(model)
        progress(f"{model}: {time.monotonic() - started_s:.1f} s")
    return {
        "rows": rows,
        "fleet": _fleet(100 if options.quick else _FLEET_ROUNDS),
        "gpu": _GPU,
        "round_trip_s": _ROUND_TRIP_S,
        **description(),
    }


def _rows(model: str) -> list[Result]:
    settings = SimulateOptions(
        model=model, gpu=_GPU, round_trip=_ROUND_TRIP_S, host_memory=_HOST.get(model)
    )
    try:
        found = prospect_of(settings)
    except PlanError as error:
        return [{"model": model, "left_out": str(error)}]
    rows = []
    for peers in PEERS:
        site = site_of(found, peers, settings.local_steps, settings.wire)
        for link in LINKS:
            result = compare(site, link.bits_per_s, _ROUND_TRIP_S)
            pipeline = result.pipeline
            rows.append(
                {
                    "model": model,
                    "parameters": found.analysis.parameters,
                    "peers": peers,
                    "link": link.name,
                    "link_bits_per_s": link.bits_per_s,
                    "atom_tokens_per_s": result.atom.tokens_per_s,
                    "averaged_every_s": result.atom.averaged_every_s,
                    "averaged_every_tokens": result.atom.averaged_every_tokens,
                    "pipeline_tokens_per_s": pipeline and pipeline.tokens_per_s,
                    "pipeline_stages": pipeline and pipeline.stages,
                    "ratio": result.ratio,
                }
            )
    return rows


def _fleet(rounds: int) -> dict[str, Any]:
    settings = SimulateOptions(**_FLEET, rounds=rounds)
    found = prospect_of(settings)
    started_s = time.perf_counter()
    rows = fleet_rows(settings, found, [1e8])
    return {**rows[0], **_FLEET, "took_s": time.perf_counter() - started_s}
