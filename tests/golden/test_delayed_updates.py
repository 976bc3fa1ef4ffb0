"""Updates that are one step late: the bits of resident training that applies gradients so."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late import check_late
from planning_models import random_shape, use_shape
from reference import twin
from swapped import DEEP_LAYERS as LAYERS
from swapped import (
    TIED,
    Partial,
    adamw,
    deep_gpt,
    gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    sgd,
    swap,
    token_batches,
)
from torch import nn

import atomtrain
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import AdamW, Muon
from atomtrain.planning import Layout, Request, Shape, make_plan
from atomtrain.planning.delayed import added_up
from atomtrain.swapping.delayed import DelayedUpdates

pytestmark = pytest.mark.usefixtures("assumed_times")
STEPS = 5
BOUNDS = tuple(range(LAYERS + 1))
SHAPES = [
    Shape(BOUNDS[:-1], BOUNDS, 2, 1),
    Shape(BOUNDS[:-1], BOUNDS, 3, 2),
    Shape(BOUNDS[:-1], BOUNDS, 2, 2, resident_blocks=(0, 2)),
    Shape(BOUNDS[:-1], BOUNDS, 2, 1, resident_blocks=(1, 3), early_blocks=(3,)),
    Shape((0, 2, 3), (0, 2, 3, 5), 2, 2, activations=("keep", "offload", "recompute")),
    Shape((0,), (0, 5), 1, 1),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(77)


def slow_updates(stream: str) -> None:
    """Updates end in the last moment."""
    if stream == "update":
        time.sleep(0.01)


def slow_loads(stream: str) -> None:
    """Steps still load when updates are long done."""
    if stream == "load":
        time.sleep(0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("inject", [slow_updates, random_delays(3)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_are_those_of_gradients_applied_one_step_late(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, clip_norm: float | None, inject: Any, tied: bool
) -> None:
    use_shape(monkeypatch, shape)
    steps = token_batches(2 - tied, steps=STEPS)
    check_late(deep_gpt(0.0, tied), steps, clip_norm=clip_norm, inject=inject)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    tied = bool(seed % 2)
    shape = random_shape(source, LAYERS, LAYERS + tied)
    use_shape(monkeypatch, shape._replace(device_blocks=()))
    clip_norm = source.choice([None, 0.5])
    inject = random_delays(seed)
    check_late(
        deep_gpt(0.0, tied), token_batches(2 - tied, STEPS), clip_norm=clip_norm, inject=inject
    )


@pytest.mark.parametrize("resident", [(), (TIED,)])
def test_a_weight_of_several_segments(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[int, ...]
) -> None:
    """Its gradient adds up on the host, where its new values cannot wait, unless it is resident."""
    use_shape(monkeypatch, Shape(BOUNDS[:-1], BOUNDS, 2, 2, resident_blocks=resident))
    check_late(deep_gpt(0.0, tied=True), token_batches(1, STEPS), inject=slow_updates)


def test_updates_come_as_backward_wants_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn is the first to deliver a gradient of the tied weight."""
    use_shape(monkeypatch, Shape(BOUNDS[:-1], BOUNDS, 2, 2))
    steps = token_batches(1)
    with swap(deep_gpt(0.0, tied=True), steps[0][0], delay_updates=True, clip_norm=1.0) as engine:
        engine.step(steps[0])
        assert list(engine._updates._order_at_end) == [TIED, LAYERS - 1, 3, 2, 1, 0]


def _muon(parameters: Any) -> torch.optim.Optimizer:
    groups: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for parameter in parameters:
        groups["muon" if parameter.dim() == 2 else "adamw"].append(parameter)
    return Muon([{"params": of, "algorithm": name} for name, of in groups.items()])


def _own(**settings: Any) -> Any:
    return lambda parameters: AdamW(parameters, lr=1e-3, **settings)


@pytest.mark.parametrize("optimizer", [sgd, _own(), _own(state="int8"), _muon])
def test_optimizers(optimizer: Any) -> None:
    steps = token_batches(1, steps=STEPS)
    check_late(gpt(), steps, optimizer, segments=4, clip_norm=1.0, inject=random_delays(5))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_is_applied_with_the_learning_rate_of_its_own_step(
    clip_norm: float | None,
) -> None:
    rates = [1e-3, 5e-4, 2e-3, 0.0, 1e-4]
    steps = token_batches(1, steps=STEPS)
    check_late(gpt(), steps, segments=4, clip_norm=clip_norm, rates=rates)


@pytest.mark.parametrize("between", ["evaluate", "state_dict", "synchronize", "more"])
def test_whoever_reads_the_model_sees_all_updates(between: str) -> None:
    steps = token_batches(1, steps=STEPS)
    reads: dict[str, Callable[[atomtrain.Engine], object]] = {
        "evaluate": lambda engine: engine.evaluate(steps[0]),
        "state_dict": lambda engine: engine.state_dict(),
        "synchronize": lambda engine: engine.synchronize() or True,
        "more": lambda engine: engine.fragment_ranges() and _all_fragments(engine),
    }
    check_late(
        gpt(), steps, segments=4, between=reads[between], inject=random_delays(8), clip_norm=1.0
    )


def _all_fragments(engine: atomtrain.Engine) -> bool:
    for start, stop in engine.fragment_ranges():
        with engine.fragment(start, stop):
            pass
    return True


@pytest.mark.parametrize("segments", [1, 4])
def test_a_model_that_is_saved_and_loaded_goes_on_to_the_bit(segments: int) -> None:
    model, steps = gpt(dropout=0.1, tied=False), token_batches(2, steps=6)
    losses = []
    options: dict[str, Any] = {"delay_updates": True, "clip_norm": 1.0, "micro_batches": 2}
    with swap(model, steps[0][0], segments=4, **options) as engine:
        for index, step in enumerate(steps):
            torch.manual_seed(index)
            losses.append(engine.step(step))
            if index == 2:
                state, moments = map(copy.deepcopy, (engine.state_dict(), engine.optimizer_state()))
        whole = copy.deepcopy(engine.state_dict())
    with swap(gpt(dropout=0.1, tied=False), steps[0][0], segments=segments, **options) as engine:
        engine.load_state_dict(state)
        engine.load_optimizer_state(moments)
        for index, step in enumerate(steps[3:], start=3):
            torch.manual_seed(index)
            assert engine.step(step) == losses[index]
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_the_clock_may_wait_without_applying_anything() -> None:
    steps = token_batches(1, steps=STEPS)
    check_late(gpt(), steps, segments=4, between=lambda engine: engine.wait(), clip_norm=1.0)


def test_an_evaluation_is_of_the_model_with_all_updates() -> None:
    steps = token_batches(1, steps=2)
    model = gpt()
    with swap(model, steps[0][0], delay_updates=True, segments=4) as engine:
        for step in steps:
            engine.step(step)
        loss = engine.evaluate(steps[0])
        engine.synchronize()
        with torch.no_grad():
            assert loss == float(twin(model)(**steps[0][0]).loss)


def test_parameters_without_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 7), Partial(7), nn.Tanh(), nn.Linear(7, 3))
    steps = [pairs([n], 6) for n in (5, 4, 5, 4, 4, 5)]
    check_late(
        model, steps, loss_of=sequential_loss, loss=regression, segments=2, inject=slow_loads
    )


@pytest.mark.parametrize(
    ("precision", "master"), [("bf16", "float32"), ("bf16", "split"), ("fp16", "float32")]
)
def test_masters(precision: str, master: Any) -> None:
    """Against late training of another plan, since resident training has no masters; steps of fp16
    are skipped until the loss is scaled by less."""
    model, steps = deep_gpt(0.0, tied=True), token_batches(2, steps=STEPS)
    other, found = twin(model), []
    for one, segments, inject in ((model, LAYERS, slow_updates), (other, 1, None)):
        options: dict[str, Any] = {"precision": precision, "gradient_dtype": "float32"}
        if precision == "fp16":
            options["loss_scale"] = 2.0**20
        with swap(
            one, steps[0][0], _own(state="bfloat16", master=master), delay_updates=True,
            segments=segments, inject=inject, clip_norm=1.0, micro_batches=2, **options,
        ) as engine:  # fmt: skip
            losses = [engine.step(step) for step in steps]
            if precision == "fp16":
                assert engine.loss_scale is not None
                assert 0 < engine.loss_scale.skipped_steps < STEPS
            found.append((losses, {k: v.clone() for k, v in engine.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def test_it_is_another_training_than_the_exact_one() -> None:
    model, steps = gpt(), token_batches(1, steps=STEPS)
    other = twin(model)
    with swap(model, steps[0][0], delay_updates=True) as late, swap(other, steps[0][0]) as exact:
        pairs_of_losses = [(late.step(step), exact.step(step)) for step in steps]
    assert pairs_of_losses[0][0] == pairs_of_losses[0][1]
    assert all(a != b for a, b in pairs_of_losses[2:])


@pytest.mark.parametrize("missing", ["loaded", "places_free"])
def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """What the tests above would not see without the wait, they see."""
    use_shape(monkeypatch, SHAPES[0])
    inject = slow_updates
    if missing == "places_free":
        monkeypatch.setattr(DelayedUpdates, "places_free", lambda *_: [])
    else:
        loaded = DelayedUpdates.loaded
        inject = slow_loads

        def early(updates: DelayedUpdates, layers: Any, blocks: Any, event: Any) -> None:
            every = range(len(updates.blocks))
            loaded(updates, layers, [b for b in every if updates._arrivals._waiting[b]], event)

        monkeypatch.setattr(DelayedUpdates, "loaded", early)
        monkeypatch.setattr("atomtrain.swapping.arrivals.Arrivals.lacks_only", lambda *_: True)
    with pytest.raises(AssertionError):
        check_late(deep_gpt(0.0, tied=False), token_batches(1, STEPS), inject=inject)


def test_a_closed_or_forgotten_engine_has_applied_all_and_holds_nothing() -> None:
    model, steps = gpt(), token_batches(1, steps=2)
    other = twin(model)
    with swap(model, steps[0][0], delay_updates=True, segments=4) as engine:
        for step in steps:
            engine.step(step)
    updates = engine._updates
    assert isinstance(updates, DelayedUpdates)
    assert (updates._hidden, updates._apart, updates._scratch.numel()) == ({}, {}, 0)
    forgotten = swap(other, steps[0][0], delay_updates=True, segments=4)
    for step in steps:
        forgotten.step(step)
    del forgotten
    gc.collect()
    found = other.state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_only_what_is_trained_has_room() -> None:
    model = nn.Sequential(nn.Linear(6, 500), nn.Tanh(), nn.Linear(500, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    with swap(model, pairs([5], 6)[0], loss=regression, delay_updates=True, segments=2) as engine:
        updates = engine._updates
        assert isinstance(updates, DelayedUpdates)
        assert 4 * 500 * 3 < updates._scratch.numel() < 4 * 500 * 5
        for step in ([batch] for batch in pairs([5, 5, 5], 6)):
            engine.step(step)


def test_host_memory_that_copies_apart_exceed_has_another_plan() -> None:
    """Offloading less leaves room for the new values of a weight that several segments share."""
    config = GPTConfig(layers=6, width=64, heads=2, head_width=32, vocabulary=4001, context=65)
    tokens = torch.randint(4001, (4, 65))
    example = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    with swap(GPT(config), example, delay_updates=True, clip_norm=1.0) as engine:
        made = engine.planner
    parts = made.chain, made.costs, made.times
    machine = dataclasses.replace(made.machine, device_memory_bytes=14_200 << 10)
    request = Request(micro_batches=1, clips=True, delays=True, updates=made.updates)
    plan = make_plan(*parts, machine, request)
    assert "offload" in plan.activations
    assert added_up(Layout(made.chain), plan.shape)
    tight = dataclasses.replace(machine, host_memory_bytes=plan.host_bytes - 1)
    found = make_plan(*parts, tight, request)
    assert found.host_bytes < plan.host_bytes
    assert "offload" not in found.activations
    least = dataclasses.replace(machine, host_memory_bytes=1 << 20)
    with pytest.raises(PlanError, match="leave out delay_updates"):
        make_plan(*parts, least, request)


def test_plan_and_engine_agree() -> None:
    model, steps = deep_gpt(0.0, tied=True), token_batches(1)
    with swap(model, steps[0][0], delay_updates=True, segments=LAYERS, clip_norm=1.0) as engine:
        plan = engine.plan
        assert plan.delays
        assert plan.update_s <= plan.period_s
        assert "one step late" in plan.describe()
        assert any(span.stream == "update" for span in engine.predicted_spans())
        assert engine.planner.period_s(plan) == plan.period_s
        engine.recording = True
        for step in steps:
            engine.step(step)
        streams = {span.stream for span in engine.last_spans()}
        assert {"update", "show", "load"} <= streams


@pytest.mark.parametrize(
    "options",
    [
        {"spend_gradients": True},
        {"disk": "/tmp"},
        {"host_layers": 1},
        {"optimizer_on_device": True},
    ],
)
def test_what_cannot_be_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="delay_updates cannot be together"):
        atomtrain.Options(delay_updates=True, **options)


@pytest.mark.parametrize("device", ["cpu", "emulated:1GiB/s,emulated:1GiB/s"])
def test_devices_that_cannot_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="one step late"):
        atomtrain.swap(
            gpt(), token_batches(1)[0][0], optimizer=adamw, device=device, device_memory="64MiB",
            options=atomtrain.Options(delay_updates=True),
        )  # fmt: skip
