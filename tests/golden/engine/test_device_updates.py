"""Blocks whose optimizer runs on the device: bits, traffic, and the host's copies on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.checkpoint import load_latest, save
from atomtrain.engine.devices.streams import Inject
from atomtrain.errors import PlanError
from atomtrain.native import library
from atomtrain.optimizers import AdamW
from atomtrain.optimizers import moments as moments_module
from atomtrain.planning import Shape
from atomtrain.training.setup.state import restore, shards_of
from tests.golden.engine import test_precision as bf16
from tests.golden.engine.test_swapped_host_optimizers import FACTORIES
from tests.support.injecting import device_with
from tests.support.planning_models import use_shape
from tests.support.reference import HeadFirst, assert_equal_training, assert_same_bits, train, twin
from tests.support.swapped import adamw, gpt, random_delays, sgd, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
SOME = Shape((0, 1, 3), (0, 2, 3, 4), 2, 2, resident_blocks=(1, 2, 3), device_blocks=(1, 3))
"""Of the four layers of `gpt`, tied or not: the second and the last."""
TIED = Shape((0, 2), (0, 1, 2, 4), 2, 1, resident_blocks=(2, 4), device_blocks=(2, 4))
"""The third layer and the shared weight."""


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices a parameter, the last of them not full."""
    torch.manual_seed(1234)
    monkeypatch.setattr(moments_module, "SLICE", 1024)


def swap(
    model: nn.Module,
    example: Any,
    factory: Any,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    options.setdefault("optimizer_on_device", True)
    return atomtrain.swap(
        model,
        example,
        optimizer=lambda _: factory(model),
        device=device_with(inject, "emulated:1GiB/s", "64MiB"),
        device_memory="64MiB",
        options=atomtrain.Options(**options),
    )


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters())


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model.parameters())


@pytest.mark.parametrize("factory", [*FACTORIES.values(), plain_adamw, plain_sgd])
@pytest.mark.parametrize(
    ("micro_batches", "clip_norm", "dropout"), [(1, 0.5, 0.3), (7, None, 0.3), (7, 0.1, 0.0)]
)
def test_a_model_that_stays_on_the_device(
    factory: Any, micro_batches: int, clip_norm: float | None, dropout: float
) -> None:
    model, steps = gpt(dropout, tied=False), token_batches(micro_batches)
    reference = twin(model)
    resident = factory(reference)
    state = torch.get_rng_state()
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    torch.set_rng_state(state)
    jobs: list[str] = []
    options = {"micro_batches": micro_batches, "clip_norm": clip_norm, "inject": jobs.append}
    with swap(model, steps[0][0], factory, **options) as engine:
        losses = [engine.step(steps[0])]
        engine._core.updates.wait()
        jobs.clear()
        losses += [engine.step(micro_batches) for micro_batches in steps[1:]]
        engine._core.updates.wait()
        moved = set(jobs) & {"load", "save", "update", "unload"}
        assert moved == ({"update", "unload"} if clip_norm else set()), "norms and a factor only"
        assert losses == expected
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(("factory", "told"), [(FACTORIES["int8"], True), (plain_adamw, False)])
def test_clipping_rewrites_gradients_only_where_an_optimizer_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, factory: Any, told: bool, on_device: bool
) -> None:
    coefficients: list[Any] = []
    model, steps = gpt(tied=False), token_batches(1)
    with swap(model, steps[0][0], factory, clip_norm=0.1, optimizer_on_device=on_device) as engine:
        step = (AdamW if told else torch.optim.AdamW).step

        def watched(self: Any, *arguments: Any) -> Any:
            gradients = [p.grad for g in self.param_groups for p in g["params"]]
            before = [None if each is None else each.clone() for each in gradients]
            coefficients.append(getattr(self, "clip_coefficient", None))
            done = step(self, *arguments)
            for left, right in zip(before, gradients, strict=True):
                assert left is None or right is None or torch.equal(left, right), "read only"
            return done

        monkeypatch.setattr(AdamW if told else torch.optim.AdamW, "step", watched)
        engine.step(steps[0])
        engine._core.updates.wait()
        assert bool(engine.plan.shape.device_blocks) is on_device
    assert coefficients
    assert all((one is not None) is told for one in coefficients)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize(("seed", "clip_norm"), [(0, None), (1, 0.5)])
def test_some_blocks_there_and_others_here(
    monkeypatch: pytest.MonkeyPatch, name: str, seed: int, clip_norm: float | None
) -> None:
    use_shape(monkeypatch, SOME)
    factory, steps, model = FACTORIES[name], token_batches(2), gpt(0.2, tied=False)
    reference = twin(model)
    resident = factory(reference)
    state = torch.get_rng_state()
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    torch.set_rng_state(state)
    options = {"micro_batches": 2, "clip_norm": clip_norm, "inject": random_delays(seed)}
    with swap(model, steps[0][0], factory, **options) as engine:
        losses = []
        for step in steps:
            losses.append(engine.step(step))
            engine.evaluate(step)  # a pass between steps
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.parametrize("shape", [TIED, None])
def test_a_shared_weight_adds_the_heads_gradients_first(
    monkeypatch: pytest.MonkeyPatch, shape: Shape | None
) -> None:
    shape = shape or Shape((0, 2), (0, 2, 4), 1, 1, "device", (0, 1, 2, 3, 4), 0, (), (4,))
    use_shape(monkeypatch, shape)
    model, steps = gpt(0.2), token_batches(7)
    head_first = HeadFirst(twin(model))
    optimizer = sgd([p for p in head_first.parameters() if p is not head_first.alias])
    state = torch.get_rng_state()
    expected = [head_first.step(micro_batches, optimizer) for micro_batches in steps]
    torch.set_rng_state(state)
    with swap(model, steps[0][0], plain_sgd, micro_batches=7) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        weights = head_first.gpt.state_dict()
        for key, value in engine.state_dict().items():
            assert_same_bits(value, weights[key], key)


@pytest.mark.parametrize("name", [*bf16.FORMATS, *bf16.OTHERS])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("shape", [SOME, None])
def test_masters_on_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, clip_norm: float | None, shape: Shape | None
) -> None:
    if shape is not None:
        use_shape(monkeypatch, shape)
    factory, steps, model = bf16.factory_of(name), token_batches(2), gpt(tied=False)
    reference, resident = bf16.narrowed(model, factory)
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    options = {"micro_batches": 2, "clip_norm": clip_norm, "inject": random_delays(3)}
    with swap(model, steps[0][0], factory, precision="bf16", **options) as engine:
        assert engine.plan.device_blocks
        assert [engine.step(batches) for batches in steps] == expected
        bf16.assert_equal(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


def clone_of(state: Any) -> Any:
    return {key: value.clone() for key, value in state.items()}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", ["float32", "int8", "muon"])
def test_a_checkpoint_goes_on_with_the_same_bits(name: str, precision: Any, tmp_path: Path) -> None:
    """From a model that stays on the device to one that is swapped, and back."""
    factory, steps, model = FACTORIES[name], token_batches(1, steps=6), gpt()
    options = {"precision": precision, "clip_norm": 0.5}
    host = {"optimizer_on_device": False, "segments": 2, **options}
    with swap(twin(model), steps[0][0], factory, **host) as engine:
        expected = [engine.step(batches) for batches in steps]
        end = clone_of(engine.state_dict())
    losses: list[float] = []
    for settings, two in ((options, steps[:2]), (host, steps[2:4]), (options, steps[4:])):
        with swap(twin(model), steps[0][0], factory, **settings) as engine:
            if losses:
                restore(engine, load_latest(tmp_path))
            losses += [engine.step(batches) for batches in two]
            save(tmp_path, len(losses), shards_of(engine), {})
            final = clone_of(engine.state_dict())
    assert losses == expected
    for key, value in final.items():
        assert_same_bits(value, end[key], key)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_what_others_write_between_steps_counts(precision: Any, clip_norm: float | None) -> None:
    """Fragments, single parameters, moments: the same as in a model whose optimizer is here."""
    steps, model, ends = token_batches(2, steps=4), gpt(tied=False), []
    options = {"micro_batches": 2, "clip_norm": clip_norm, "precision": precision}
    for there in (False, True):
        copy = twin(model)
        with swap(
            copy, steps[0][0], FACTORIES["float32"], optimizer_on_device=there, **options
        ) as engine:
            losses = [engine.step(steps[0])]
            start, stop = engine.fragment_ranges()[1]
            with engine.fragment(start, stop) as values:
                values.mul_(0.5)
            losses.append(engine.step(steps[1]))
            engine.synchronize()
            weight = copy.head.norm.weight
            engine.masters.write(weight, engine.masters.read(weight) + 1)
            losses.append(engine.evaluate(steps[1]))
            losses.append(engine.step(steps[2]))
            engine.load_optimizer_state(
                {n: {k: v.clone() * 2 for k, v in s.items()}
                 for n, s in engine.optimizer_state().items()}
            )  # fmt: skip
            losses.append(engine.step(steps[3]))
            state = clone_of(engine.state_dict())
            moments = {n: clone_of(s) for n, s in engine.optimizer_state().items()}
            ends.append((losses, state, moments, engine.gradient_norm))
    here, there_ = ends
    assert there_[0] == here[0]
    assert there_[3] == here[3]
    for key, value in there_[1].items():
        assert_same_bits(value, here[1][key], key)
    for name, entry in there_[2].items():
        assert entry.keys() == here[2][name].keys()
        for key, value in entry.items():
            assert_same_bits(value, here[2][name][key], f"{name}/{key}")


def test_more_micro_batches_than_planned_for_take_the_state_along() -> None:
    model, steps = gpt(tied=False), [token_batches(1)[0], token_batches(7)[0], token_batches(2)[0]]
    reference = twin(model)
    resident = plain_adamw(reference)
    expected = train(reference, steps, resident, clip_norm=0.5)
    with swap(model, steps[0][0], plain_adamw, clip_norm=0.5) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)


def test_a_frozen_layer_stays_there_untouched() -> None:
    model, steps = gpt(tied=False), token_batches(2)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    reference = twin(model)

    def factory(owned: nn.Module) -> torch.optim.Optimizer:
        return adamw([p for p in owned.parameters() if p.requires_grad])

    resident = factory(reference)
    expected = train(reference, steps, resident)
    with swap(model, steps[0][0], factory, micro_batches=2) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)


def test_an_optimizer_that_says_nothing_stays_on_the_host() -> None:
    example = token_batches(1)[0][0]

    def factory(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(model.parameters())

    with pytest.raises(PlanError, match="cannot run on the device"):
        swap(gpt(), example, factory)
    with swap(gpt(), example, factory, optimizer_on_device=None) as engine:
        assert engine.plan.device_blocks == ()


def test_the_planner_leaves_the_model_on_the_device_where_there_is_room() -> None:
    example = token_batches(1)[0][0]
    with swap(gpt(), example, plain_adamw, optimizer_on_device=None) as engine:
        assert engine.plan.device_blocks
        assert "on device  optimizer of blocks" in engine.plan.describe()
        engine.step([example])


@pytest.mark.parametrize("state", ["bfloat16", "int8"])
def test_scratch_of_updates_there_is_not_held_while_others_run(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Held scratch would add to the peak of later steps, which the prediction has without it."""
    for name in ("SLICE", "HOST_PASS"):
        monkeypatch.setattr(moments_module, name, 1 << 20)
    monkeypatch.setattr(library, "core", lambda: None)  # which needs none, and no GPU has
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    batch = torch.randn(16, 512)
    with atomtrain.swap(
        model,
        batch,
        optimizer=lambda given: AdamW(given, state=state),
        loss=lambda output: output.square().mean(),
        device="emulated:1GiB/s",
        device_memory="64MiB",
        options=atomtrain.Options(optimizer_on_device=True),
    ) as engine:
        for _ in range(3):
            engine.step([batch])
            assert engine.last is not None
            assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
        held = engine.device.peak_bytes
        engine.device.reset_peak()
        assert engine.plan.device_peak_bytes - held() >= 2 * 4 * 512 * 512  # two moments
