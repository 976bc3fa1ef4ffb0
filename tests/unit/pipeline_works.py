"""A small pipeline for tests of the simulation."""

from __future__ import annotations

from atomtrain.simulation.pipeline import PipelineWork


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
