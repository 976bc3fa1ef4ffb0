"""What visits take comes a micro-batch ahead, across visits too, within the memory that counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.engine.execution.boundary_activations import (
    NOTHING,
    ActivationPrefetch,
    BoundaryActivations,
    Outbox,
    Wanted,
)
from atomtrain.engine.execution.executor import Executor
from atomtrain.planning.cost.timeline import label_of
from atomtrain.planning.plan.shape import Phase
from tests.support.engine_models import mlp, square, swap

X = torch.ones(2, 8)
COUNT = 3
A, B = Wanted(("a",)), Wanted(("b",))


class Bench(NamedTuple):
    """What a visit works with."""

    coming: ActivationPrefetch
    values: BoundaryActivations
    gradients: BoundaryActivations


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = EmulatedDevice(1 << 20, 1e12)
    pool, outbox = HostPool(device), Outbox(device)
    values, gradients = (BoundaryActivations(device, pool, outbox) for _ in range(2))
    with device.computing():
        yield Bench(ActivationPrefetch(values, gradients), values, gradients)
        values.clear()
        gradients.clear()
    device.close()


def put(carried: BoundaryActivations, name: str, elements: int) -> None:
    for micro_batch in range(COUNT):
        carried.put_input(micro_batch, name, torch.full((elements,), float(micro_batch)))


def away(carried: BoundaryActivations, name: str) -> list[bool]:
    """Say of each micro-batch whether a value is on the host only."""
    return [carried.away_bytes(micro_batch, [name]) > 0 for micro_batch in range(COUNT)]


def test_each_micro_batch_comes_while_the_one_before_computes(bench: Bench) -> None:
    put(bench.values, "a", 5)
    bench.coming.begin(A, NOTHING, COUNT)
    for micro_batch in range(COUNT):
        taken = bench.coming.take(micro_batch)["a"]
        assert torch.equal(taken, torch.full((5,), float(micro_batch)))
        assert away(bench.values, "a") == [i > micro_batch + 1 for i in range(COUNT)]


@pytest.mark.parametrize(("elements", "comes"), [(4, True), (5, True), (6, False)])
def test_the_next_visit_gets_the_room_of_what_came_ahead(
    bench: Bench, elements: int, comes: bool
) -> None:
    put(bench.values, "a", 5)
    put(bench.values, "b", elements)
    bench.coming.begin(A, B, COUNT)
    for micro_batch in range(COUNT):
        assert away(bench.values, "b") == [True] * COUNT
        bench.coming.take(micro_batch)
        bench.values.drop(micro_batch, ["a"])
    assert away(bench.values, "b") == [not comes, True, True]
    bench.coming.begin(B, NOTHING, COUNT)
    assert torch.equal(bench.coming.take(0)["b"], torch.zeros(elements))


def test_gradients_count_too(bench: Bench) -> None:
    put(bench.values, "a", 5)
    put(bench.values, "b", 5)
    put(bench.gradients, "b", 1)
    bench.coming.begin(A, Wanted(("b",), ("b",)), COUNT)
    for micro_batch in range(COUNT):
        bench.coming.take(micro_batch)
    assert away(bench.values, "b") == away(bench.gradients, "b") == [True] * COUNT


def test_one_micro_batch_leaves_no_room(bench: Bench) -> None:
    put(bench.values, "a", 5)
    put(bench.values, "b", 1)
    bench.coming.begin(A, B, 1)
    bench.coming.take(0)
    assert away(bench.values, "b") == [True] * COUNT


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("boundary", ["device", "host"])
def test_backward_visits_find_their_first_values_on_the_way(
    monkeypatch: pytest.MonkeyPatch, boundary: str
) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", (boundary,))
    noted: list[str] = []
    submitting, visiting = Stream.submit, Executor._visit

    def submit(stream: Stream, job: Any, after: Any = (), label: str | None = None) -> Event:
        if stream.name == "fetch":
            noted.append(f"{label} comes")
        return submitting(stream, job, after, label)

    def visit(executor: Executor, one: Any, *arguments: Any) -> None:
        noted.append(label_of(one))
        visiting(executor, one, *arguments)

    monkeypatch.setattr(Stream, "submit", submit)
    monkeypatch.setattr(Executor, "_visit", visit)
    batches: list[Tensor] = [X * number for number in range(1, COUNT + 1)]
    with swap(
        mlp(5), X, loss=square, segments=5, micro_batches=COUNT, activations="recompute",
        host_layers=0,
    ) as engine:  # fmt: skip
        engine.step(batches)
        visits = engine._core.executor._training.visits
    labels = [label_of(visit) for visit in visits if visit.phase is Phase.BACKWARD]
    assert len(labels) == 4
    # Those that a visit fetches: values, and gradients where they wait on the host too.
    fetched = 1 if boundary == "device" else 2
    for label in labels:
        begun = noted.index(label)
        before = noted[:begun].count(f"{label} comes")
        # The turn has its values on the device, so nothing came ahead, and there is no room.
        assert before == (0 if label == labels[0] else fetched)
        assert noted.count(f"{label} comes") == COUNT * fetched
