"""What of one visit overlaps with the next one: the same bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.swapped import (
    DEEP_LAYERS,
    Skips,
    check,
    deep_gpt,
    random_delays,
    swap,
    token_batches,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("assumed_times")
EACH = tuple(range(DEEP_LAYERS + 1))
MIXED: tuple[Any, ...] = ("recompute", "offload", "recompute", "keep", "recompute")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(44)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(EACH[:-1], EACH, 2, 1, "host"),
        Shape(EACH[:-1], EACH, 2, 2, "device"),
        Shape((0, 1, 3), (0, 2, 3, 5), 2, 2, "host"),
        Shape(EACH[:-1], EACH, 2, 2, "host", (0,), 0, MIXED),
        Shape(EACH[1:-1], EACH[1:], 3, 2, "host", (), 1),
    ],
)
def test_whatever_the_plan(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    use_shape(monkeypatch, shape)
    # What draws random numbers does not run on the host.
    model = deep_gpt(0.0 if shape.host_layers else 0.1, tied=False)
    check(model, token_batches(3, steps=2), inject=random_delays(3))


@pytest.mark.parametrize("boundary", ["device", "host"])
def test_values_that_several_segments_read(monkeypatch: pytest.MonkeyPatch, boundary: Any) -> None:
    use_shape(monkeypatch, Shape((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), 2, 2, boundary))

    def batch() -> dict[str, Tensor]:
        return {"x": torch.randn(3, 6), "side": torch.randn(3, 6)}

    steps = [[batch() for _ in range(3)] for _ in range(2)]
    check(Skips(), steps, loss_of=lambda model, of: model(**of), inject=random_delays(5))


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_visit_computes_while_the_gradients_of_the_one_before_leave(
    monkeypatch: pytest.MonkeyPatch, activations: Any
) -> None:
    """There is one buffer for both, but gradients come to it only after much was computed."""
    how = (activations,) * (DEEP_LAYERS - 1) + ("recompute",)
    use_shape(monkeypatch, Shape(EACH[:-1], EACH, 2, 1, "device", (), 0, how))
    begun, in_time = threading.Event(), list[bool]()
    model = deep_gpt(0.0, tied=False)

    def leaving(stream: str) -> None:
        if stream == "unload" and not in_time:  # the head's
            in_time.append(begun.wait(PATIENCE_S))

    def watch(_: Any, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: begun.set())

    step = token_batches(1, steps=1)[0]
    with swap(model, step[0], inject=leaving) as engine:
        model.blocks[-1].register_forward_hook(watch)
        engine.step(step)
        engine.synchronize()
    assert in_time == [True]
