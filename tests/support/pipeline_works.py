"""A small pipeline, and peers to compare with one, for tests of the simulation."""

from __future__ import annotations

from atomresearch.simulation.compare import LayerWork, Site
from atomresearch.simulation.pipeline import PipelineWork

LAYER = LayerWork(
    forward_s=1.0,
    backward_s=2.0,
    parameters=1000,
    kept_bytes=50_000,
    boundary_values=10_000,
    boundary_rows=100,
)


def work(ranks: int, chunks: int = 1, **changes: object) -> PipelineWork:
    fields: dict[str, object] = {
        "ranks": ranks,
        "forward_s": [1.0] * (ranks * chunks),
        "backward_s": [2.0] * (ranks * chunks),
        "micro_batches": 8,
        "in_flight": ranks,
        "boundary_bytes": 0,
    }
    return PipelineWork(**{**fields, **changes})  # type: ignore[arg-type]


def site(peers: int, **changes: object) -> Site:
    fields: dict[str, object] = {
        "peers": peers,
        "step_s": 32.0,
        "micro_batches": 8,
        "micro_batch_tokens": 100,
        "layers": [LAYER] * 8,
        "device_memory_bytes": 10**9,
        "exchange_bytes": [8_000, 8_000],
        "local_steps": 4,
    }
    return Site(**{**fields, **changes})  # type: ignore[arg-type]
