"""Segments that come ahead for the next step: the same bits, whatever happens between steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planning_models import random_shape, use_shape
from reference import assert_equal_training, train, twin
from swapped import DEEP_LAYERS as LAYERS
from swapped import (
    TIED,
    adamw,
    check,
    deep_gpt,
    fused_adamw,
    gpt,
    random_delays,
    sgd,
    swap,
    token_batches,
)
from torch import nn

import atomtrain
from atomtrain.analysis.trace import chain_of
from atomtrain.errors import StreamError
from atomtrain.optimizers import AdamW, Muon
from atomtrain.planning import Layout, Shape
from atomtrain.planning.parts import parts_of
from atomtrain.planning.period import arriving, coming_segments
from atomtrain.planning.schedule import training_visits
from atomtrain.planning.timeline import label_of

pytestmark = pytest.mark.usefixtures("assumed_times")
EACH = tuple(range(LAYERS + 1))
MARK = "(next step)"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(99)


def muon(parameters: Any) -> torch.optim.Optimizer:
    groups = {"muon": [], "adamw": []}
    for parameter in parameters:
        groups["muon" if parameter.dim() == 2 else "adamw"].append(parameter)
    return Muon([{"params": of, "algorithm": name} for name, of in groups.items()])


def came_ahead(engine: atomtrain.Engine, step: Any) -> list[str]:
    """Take a step; return what came for the next one, in order."""
    engine.recording = True
    engine.step(step)
    engine.recording = False
    return [span.label for span in engine.last_spans() if MARK in span.label]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_any_number_of_slots(slots: int, activations: Any) -> None:
    steps = token_batches(2, steps=4)
    check(
        deep_gpt(0.2, tied=False), steps, segments=LAYERS, slots=slots, activations=activations,
        host_layers=0, inject=random_delays(slots),
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        Shape((0, 1, 3), (0, 2, 3, 5), 3, 2),
        Shape(EACH[:-1], EACH, 4, 1, "host", (TIED,)),
        Shape(EACH[:-1], EACH, 3, 2, "device", (0, TIED), early_blocks=(TIED,)),
        Shape((0, 2, 3, 4), (0, 1, 2, 4, 5), 3, 2),
        Shape((0,), (0, 5), 1, 1),
    ],
)
def test_shared_weights_come_when_all_have_added(
    monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    use_shape(monkeypatch, shape)
    check(deep_gpt(0.0, tied=True), token_batches(1, steps=4), inject=random_delays(3))


def test_as_many_come_as_there_are_slots_and_are_not_loaded_again() -> None:
    model, step = deep_gpt(0.0, tied=False), token_batches(2, steps=1)[0]
    options = {"segments": LAYERS, "slots": 3, "host_layers": 0, "micro_batches": 2}
    with swap(model, step[0], **options) as engine:
        for _ in range(2):
            came = came_ahead(engine, step)
            assert came == [f"forward {layer} {MARK}" for layer in (2, 1, 0)]
        loaded = [s.label for s in engine.last_spans() if s.stream == "load"]
        assert not {"forward 0", "forward 1", "forward 2"}.intersection(loaded)
    with swap(twin(model), step[0], clip_norm=1.0, **options) as engine:
        assert came_ahead(engine, step) == [], "updates wait for the norm of all gradients"


def test_waiting_keeps_what_came_and_synchronizing_does_not() -> None:
    model, step = deep_gpt(0.0, tied=False), token_batches(2, steps=1)[0]
    options = {"segments": LAYERS, "slots": 3, "host_layers": 0, "micro_batches": 2}
    with swap(model, step[0], inject=random_delays(5), **options) as engine:
        for pause, kept in ((engine.wait, True), (engine.synchronize, False)):
            engine.step(step)
            pause()
            assert all(event.is_done() for event in engine._updates.updated)
            engine.recording = True
            engine.step(step)
            engine.recording = False
            loaded = {span.label for span in engine.last_spans() if span.stream == "load"}
            assert ("forward 0" not in loaded) is kept


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw, sgd, muon])
@pytest.mark.parametrize("slots", [1, 2])
def test_segments_that_come_ahead_go_and_come_in_parts(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any, slots: int
) -> None:
    monkeypatch.setattr("atomtrain.planning.parts._LEAST_BYTES", 256)
    use_shape(monkeypatch, Shape(EACH[1:-1], EACH[1:], slots, 2, "device", (), 1))
    model, steps = deep_gpt(0.0, tied=False), token_batches(2, steps=4)
    jobs: list[str] = []
    delay = random_delays(4)

    def inject(stream: str) -> None:
        jobs.append(stream)
        delay(stream)

    check(model, steps, optimizer, inject=inject)
    chain = chain_of(model, steps[0][0]).chain
    first = range(1, 1 + slots)
    layers = [list(chain.layers[layer].parameters.values()) for layer in first]
    parts = [len(parts_of(Layout(chain), *each)) for each in zip(first, layers, strict=True)]
    assert min(parts) > 2
    assert jobs.count("unload") == len(steps) * (LAYERS - 1 - slots + sum(parts))


@pytest.mark.parametrize("seed", range(12))
def test_what_comes_ahead_is_what_the_planner_expects(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Which segments, in which order, in how many parts: of random shapes."""
    monkeypatch.setattr("atomtrain.planning.parts._LEAST_BYTES", 256)
    source = random.Random(seed)
    tied = bool(seed % 2)
    shape = random_shape(source, LAYERS, LAYERS + tied)
    use_shape(monkeypatch, shape)
    model, step = deep_gpt(0.0, tied=tied), token_batches(1, steps=1)[0]
    with swap(model, step[0], micro_batches=1) as engine:
        visits, chain = training_visits(shape), engine.planner.chain
        expected = []
        for each in coming_segments(shape, visits, chain, Layout(chain), in_parts=True):
            visit = visits[each.over.visit]
            if arriving(shape, Layout(chain), *visit.layers):  # else all is updated on the device
                expected += len(each.shares) * [f"{label_of(visit)} {MARK}"]
        assert came_ahead(engine, step) == expected
        assert came_ahead(engine, step) == expected


class CountsItsCalls(torch.optim.SGD):
    """Steps get shorter with each call, which it counts in its groups, as many optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


def test_an_optimizer_that_counts_its_calls_is_called_once_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atomtrain.planning.parts._LEAST_BYTES", 256)
    use_shape(monkeypatch, Shape(EACH[1:-1], EACH[1:], 2, 2, "device", (), 1))
    check(
        deep_gpt(0.0, tied=False),
        token_batches(2, steps=4),
        lambda parameters: CountsItsCalls(parameters, lr=0.1),
    )


@pytest.mark.parametrize("stream", ["unload", "update", "load"])
@pytest.mark.parametrize("position", [6, 9, 13])
def test_a_part_that_fails_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, stream: str, position: int
) -> None:
    monkeypatch.setattr("atomtrain.planning.parts._LEAST_BYTES", 256)
    model, steps = deep_gpt(0.0, tied=False), token_batches(2, steps=6)
    seen: list[str] = []

    def fail(of: str) -> None:
        seen.append(of)
        if of == stream and seen.count(of) == position:
            raise ValueError(f"injected in {stream}")

    def train_all() -> None:
        for step in steps:
            engine.step(step)

    options = {"segments": LAYERS, "slots": 2, "host_layers": 0, "micro_batches": 2}
    engine = swap(model, steps[0][0], inject=fail, **options)
    with pytest.raises(StreamError, match=f"injected in {stream}"):
        train_all()
    for pause in (engine.wait, engine.synchronize):
        with pytest.raises(StreamError, match="failed earlier"):
            pause()
    engine.close()


def test_parts_are_runs_of_whole_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_gpt(0.0, tied=False)
    chain = chain_of(model, token_batches(1)[0][0]).chain
    layout, members = Layout(chain), list(chain.layers[1].parameters.values())
    assert parts_of(layout, 1, members) == (), "it is small"
    monkeypatch.setattr("atomtrain.planning.parts._LEAST_BYTES", 256)
    parts = parts_of(layout, 1, members)
    start, stop = layout.block_range(1)
    for part in parts:
        assert part.start_bytes == start
        assert part.stop_bytes - start >= 256
        start = part.stop_bytes
    assert start == stop
    assert [p for part in parts for p in part.members] == members
    members[0].requires_grad_(requires_grad=False)
    frozen = chain_of(model, token_batches(1)[0][0]).chain
    assert parts_of(Layout(frozen), 1, members) == (), "gradients lie elsewhere"


def scale(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    """Write to what the engine gives out for writing; without one, to the model."""
    if engine is not None:
        for start, stop in engine.fragment_ranges():
            with engine.fragment(start, stop) as values:
                values.mul_(0.5)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def load(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    of = engine.state_dict() if engine is not None else model.state_dict()
    halves = {name: value * 0.5 for name, value in of.items()}
    (engine if engine is not None else model).load_state_dict(halves)


def write(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    if engine is not None:
        engine.synchronize()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("between", [scale, load, write])
def test_what_is_written_between_steps_is_what_the_next_one_uses(
    between: Callable[[Any, nn.Module], None],
) -> None:
    model, steps = gpt(0.0, tied=False), token_batches(2, steps=4)
    reference = twin(model)
    resident = adamw(reference.parameters())
    options = {"segments": 4, "slots": 3, "host_layers": 0, "micro_batches": 2}
    with swap(model, steps[0][0], inject=random_delays(1), **options) as engine:
        for first, second in (steps[:2], steps[2:]):
            for step in (first, second):
                assert [engine.step(step)] == train(reference, [step], resident)
            between(engine, model)
            between(None, reference)
        assert_equal_training(engine, reference, resident)


def test_evaluations_and_larger_steps_in_between() -> None:
    model = gpt(0.0, tied=False)
    steps = [*token_batches(2, steps=2), *token_batches(3, steps=2)]
    reference = twin(model)
    resident = adamw(reference.parameters())
    options = {"segments": 4, "slots": 3, "host_layers": 0, "micro_batches": 2}
    with swap(model, steps[0][0], inject=random_delays(2), **options) as engine:
        for step in steps:
            assert [engine.step(step)] == train(reference, [step], resident)
            engine.step(step)
            train(reference, [step], resident)
            with torch.no_grad():
                expected = sum(float(twin(reference)(**batch).loss) for batch in step) / len(step)
            assert engine.evaluate(step) == expected
        assert_equal_training(engine, reference, resident)


def test_masters_and_their_streams() -> None:
    """In bfloat16 what comes ahead is what the update wrote last."""

    def optimizer(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=1e-2)

    steps = token_batches(2, steps=4)
    states = []
    for slots in (1, 4):
        torch.manual_seed(1)
        model = deep_gpt(0.0, tied=False)
        with swap(
            model, steps[0][0], optimizer, precision="bf16", slots=slots, segments=LAYERS,
            host_layers=0, micro_batches=2, inject=random_delays(slots),
        ) as engine:  # fmt: skip
            losses = [engine.step(step) for step in steps]
            states.append((losses, {n: v.clone() for n, v in engine.state_dict().items()}))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert torch.equal(value, states[1][1][name]), name
