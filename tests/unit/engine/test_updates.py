"""Updates and hand-overs: exact sums of gradients, and who waits for whom."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.devices.streams import Event, Stream, finished
from atomtrain.engine.execution.slots import Slots
from tests.support.engine_models import mlp, square, swap
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.ones(2, 8)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_gradient_of_minus_zero_stays_minus_zero(micro_batches: int) -> None:
    """Resident training takes the first gradient as it is; adding it to +0.0 would change it."""

    def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    example = torch.full((8,), -0.0)
    with swap(
        nn.Sequential(Scale()),
        example,
        loss=torch.sum,
        optimizer=momentum,
        micro_batches=micro_batches,
    ) as engine:
        engine.step([example] * micro_batches)
        buffer = engine.optimizer_state()["0.weight"]["momentum_buffer"]
        assert torch.equal(buffer, torch.zeros(8))
        assert bool(torch.signbit(buffer).all())


def test_a_fragment_waits_for_every_update_that_it_overlaps() -> None:
    gate = threading.Event()
    gate.set()

    def inject(stream: str) -> None:
        if stream == "update":
            assert gate.wait(PATIENCE_S)

    with swap(mlp(), X, loss=square, segments=3, inject=inject) as engine:
        engine.step([X])
        engine.synchronize()
        start, _ = engine.fragment_ranges()[0]
        before = engine.state_dict()["0.weight"].clone()
        gate.clear()
        engine.step([X])
        threading.Timer(0.05, gate.set).start()
        with engine.fragment(start + 4, start + 8) as view:
            assert view.numel() == 1, "a part in the middle of the weight"
            assert float(view) != float(before.flatten()[1]), "its update is done"


def test_a_load_waits_for_the_last_use_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device's compute is done at once, so the marks themselves are looked at."""
    done = [-1]
    made: dict[int, int] = {}
    keep: list[Event] = []
    loads: list[int] = []

    def mark(_: Any) -> Event:
        event = finished()
        keep.append(event)
        made[id(event)] = done[0]
        return event

    def advance(slots: Slots, index: int, real: Any = Slots._advance) -> None:
        done[0] = index
        real(slots, index)

    submitting = Stream.submit

    def submit(stream: Stream, job: Any, after: Any = (), label: Any = None) -> Event:
        if stream.name == "load":
            loads.append(max(made.get(id(event), -2) for event in after))
        return submitting(stream, job, after, label)

    monkeypatch.setattr(EmulatedDevice, "mark", mark)
    monkeypatch.setattr(Slots, "_advance", advance)
    monkeypatch.setattr(Stream, "submit", submit)
    with swap(mlp(5), X, loss=square, segments=5, slots=2) as engine:
        engine.step([X])
        visits = [visit for visit in engine._core.executor._training.visits if visit.load]
    for marked, visit in zip(loads, visits, strict=True):
        assert marked >= visit.free_after


def test_a_fetch_waits_for_the_save_of_what_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", ("host",))

    def slow_save(stream: str) -> None:
        if stream == "save":
            time.sleep(0.01)

    losses = []
    for inject in (None, slow_save):
        torch.manual_seed(0)
        with swap(mlp(4), X, loss=square, segments=4, inject=inject) as engine:
            losses.append([engine.step([torch.full((2, 8), float(n))]) for n in range(1, 4)])
    assert losses[0] == losses[1]
