"""What holds of every test on a real GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atomtrain.engine.calibration import compile_choice


@pytest.fixture(autouse=True, scope="module")
def _as_they_are() -> Iterator[None]:
    """Leave layers uncompiled, whatever times say: some tests compare runs bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_choice, "TRIED_ON", frozenset())
        yield


@pytest.fixture(autouse=True)
def _allocates_without_retries() -> Iterator[None]:
    """Fail a test in which the allocator had to give memory back, and wait for the GPU, before it
    could allocate: plans leave room enough."""
    if not torch.backends.cuda.is_built() or not torch.cuda.is_available():
        yield
        return
    before = _retries()
    yield
    assert _retries() == before, "the allocator had to try again; is more than the budget planned?"


def _retries() -> int:
    return sum(
        int(torch.cuda.memory_stats(index).get("num_alloc_retries", 0))
        for index in range(torch.cuda.device_count())
    )
