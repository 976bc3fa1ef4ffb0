"""Canaries: whatever is free is overwritten with NaN at once, and training has the same bits.

Old contents of a slot or a buffer are often right by chance (the same segment comes to the same
slot in each step), so that reading too early, or what should be gone, would not be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from atomtrain.engine.execution.slots import Slots
from atomtrain.engine.state.residents import Copy
from atomtrain.engine.updates.updates import Updates
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import check, deep_gpt, random_delays, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
NAN = 0xFF
"""Of each byte: NaN in every floating type."""
BOUNDS = tuple(range(LAYERS + 1))
SHAPES = [
    Shape((0, 1, 2, 3, 4), BOUNDS, 2, 2),
    Shape((0, 1, 2, 3, 4), BOUNDS, LAYERS, 1),
    Shape((0, 1, 3), (0, 2, 3, 5), 1, 1, "host", resident_blocks=(4,)),
    Shape((0, 2, 3, 4), (0, 2, 3, 4, 5), 3, 2,
          activations=("offload", "keep", "recompute", "recompute")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put them into slots, gradient buffers and the host's gradients; return where some were."""
    put: list[str] = []
    leave, out, update_job = Slots.leave, Slots._out, Updates._update_job

    def left(slots: Slots, index: int) -> None:
        visit = slots._visits[index]
        later = (v for v in slots._visits[index + 1 :] if v.slot == visit.slot)
        following = next(later, None)
        if following is None or following.load:
            slots.slot_of(visit).fill_(NAN)
            put.append("slot")
        leave(slots, index)

    def sent(slots: Slots, copies: Sequence[Copy]) -> Callable[[], None]:
        job = out(slots, copies)

        def copy() -> None:
            job()
            for _, source in copies:
                source.fill_(NAN)
            put.append("gradient buffer")

        return copy

    def updated(updates: Updates, block: int, *rest: Any) -> Callable[[], None]:
        job = update_job(updates, block, *rest)

        def update() -> None:
            job()
            for parameter in rest[1] if len(rest) > 1 else updates.members(block):
                updates._store.gradient(parameter).fill_(float("nan"))
            put.append("host gradient")

        return update

    monkeypatch.setattr(Slots, "leave", left)
    monkeypatch.setattr(Slots, "_out", sent)
    monkeypatch.setattr(Updates, "_update_job", updated)
    return put


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.5}, {"spend_gradients": True}], ids=["", "clips", "spends"]
)
def test_nothing_that_is_free_is_read(
    monkeypatch: pytest.MonkeyPatch, canaries: list[str], shape: Shape, options: dict[str, Any]
) -> None:
    use_shape(monkeypatch, shape)
    steps = token_batches(2)
    check(deep_gpt(0.2, tied=False), steps, inject=random_delays(8), **options)
    assert set(canaries) == {"slot", "gradient buffer", "host gradient"}


def test_a_load_that_nobody_waits_for_is_seen(
    monkeypatch: pytest.MonkeyPatch, canaries: list[str]
) -> None:
    """A slot for each segment: what it held before is nearly right, and is NaN."""
    use_shape(monkeypatch, SHAPES[1])
    enter = Slots.enter

    def hasty(slots: Slots, index: int) -> Any:
        slots._loads.pop(index, None)
        return enter(slots, index)

    def slow_loads(stream: str) -> None:
        if stream == "load":
            time.sleep(0.02)

    monkeypatch.setattr(Slots, "enter", hasty)
    with pytest.raises(AssertionError):
        check(deep_gpt(0.0, tied=False), token_batches(1), inject=slow_loads)
    assert "slot" in canaries
