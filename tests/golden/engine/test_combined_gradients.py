"""What is done to gradients before their updates: exactly that, whatever the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import atomtrain
from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.errors import ConfigError, StreamError
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.reference import assert_equal_training, gpt_loss, train, twin
from tests.support.swapped import (
    DEEP_LAYERS,
    TIED,
    adamw,
    deep_gpt,
    random_delays,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")
EACH = tuple(range(DEEP_LAYERS + 1))
SHAPES = [
    Shape(EACH[:-1], EACH, 3, 2),
    Shape((0, 1, 3), (0, 2, 3, 5), 3, 2),
    Shape(EACH[:-1], EACH, 4, 1, "host", (TIED,)),
    Shape((0,), (0, 5), 1, 1),
]
ON_HOST = Shape(EACH[1:-1], EACH[1:], 2, 2, "device", (), 1)
"""Its embedding is on the host, which a tied one cannot be."""


@pytest.fixture
def elsewhere() -> Iterator[Stream]:
    stream = Stream("combining")
    yield stream
    stream.close()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("shape", [*SHAPES, ON_HOST])
def test_updates_see_what_was_made_of_gradients(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Stream, shape: Shape, clip_norm: float | None
) -> None:
    """Twice the gradients, a little later, are those of twice the loss."""
    torch.manual_seed(3)
    use_shape(monkeypatch, shape)
    tied = shape is not ON_HOST
    # With more micro-batches a tied weight's gradients are added in an order of their own.
    model, steps = deep_gpt(0.0, tied=tied), token_batches(1 if tied else 2)
    reference = twin(model)
    resident = adamw(reference.parameters())
    losses = train(reference, steps, resident, lambda m, of: 2 * gpt_loss(m, of), clip_norm)

    def twice(gradient: Tensor, complete: Sequence[Event]) -> Event:
        def double() -> None:
            time.sleep(2e-3)
            gradient.view(torch.float32).mul_(2)

        return elsewhere.submit(double, complete)

    options = {"clip_norm": clip_norm, "inject": random_delays(4)}
    with swap(model, steps[0][0], micro_batches=len(steps[0]), **options) as engine:
        engine.combine_gradients(twice)
        assert [2 * engine.step(step) for step in steps] == losses
        assert_equal_training(engine, reference, resident)


def test_blocks_come_in_one_order_whatever_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else hosts whose plans differ would wait for each other."""
    orders = []
    step = token_batches(1, steps=1)[0]
    for shape in SHAPES:
        use_shape(monkeypatch, shape)
        order: list[int] = []

        def noting(gradient: Tensor, complete: Sequence[Event], order: list[int] = order) -> Event:
            order.append(gradient.storage_offset())
            return complete[-1]

        with swap(deep_gpt(0.0, tied=True), step[0]) as engine:
            engine.combine_gradients(noting)
            engine.step(step)
        orders.append(order)
    assert len(orders[0]) == DEEP_LAYERS + 1
    assert all(order == orders[0] for order in orders)


def test_what_fails_on_the_way_ends_the_engine(elsewhere: Stream) -> None:
    def fail() -> None:
        raise OSError("the network is gone")

    step = token_batches(1, steps=1)[0]
    engine = swap(deep_gpt(0.0, tied=True), step[0])
    engine.combine_gradients(lambda _, complete: elsewhere.submit(fail, complete))
    engine.step(step)
    with pytest.raises(StreamError, match="the network is gone"):
        engine.step(step)
    engine.close()


@pytest.mark.parametrize(
    ("device", "options", "complaint"),
    [
        ("emulated:1GiB/s", {"optimizer_on_device": None}, "optimizer_on_device=False"),
        ("cpu", {}, "not gathered on the host where"),
        (["emulated", "emulated"], {}, "one device each"),
    ],
)
def test_engines_that_cannot_say_so(device: Any, options: dict[str, Any], complaint: str) -> None:
    with (
        atomtrain.swap(
            deep_gpt(0.0, tied=True),
            token_batches(1, steps=1)[0][0],
            optimizer=adamw,
            device=device,
            device_memory="64MiB",
            options=atomtrain.Options(**{"optimizer_on_device": False, **options}),
        ) as engine,
        pytest.raises(ConfigError, match=complaint),
    ):
        engine.combine_gradients(lambda _, complete: complete[-1])
