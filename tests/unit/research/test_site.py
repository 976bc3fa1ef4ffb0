"""Simulated peers average in as many fragments as those of a run."""

from __future__ import annotations

import pytest

from atomresearch.simulation.site import fragments_of
from atomtrain.training.together.peering import joined

_PIECE = 16 << 20
"""Elements of the engine's largest fragment, of 64 MiB."""


@pytest.mark.parametrize("local_steps", [1, 4, 30, 91, 1000])
@pytest.mark.parametrize("pieces", [4, 30, 91, 2000])
def test_fragments_are_joined_as_a_run_joins_them(pieces: int, local_steps: int) -> None:
    assert fragments_of(pieces * _PIECE, local_steps) == len(joined([_PIECE] * pieces, local_steps))


def test_a_small_model_has_a_few_fragments() -> None:
    assert fragments_of(1000, local_steps=30) == 4
