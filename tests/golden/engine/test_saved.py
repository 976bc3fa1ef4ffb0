"""What forward saves is kept, offloaded or recomputed: every mix equals resident training."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.execution import offload
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import AdamW
from atomtrain.planning import Shape
from atomtrain.planning.plan.shape import ACTIVATIONS, Activation
from tests.support.planning_models import use_shape
from tests.support.swapped import (
    Skips,
    adamw,
    check,
    deep_gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")
BOUNDS = (0, 1, 3, 4)
MIXES = list(itertools.product(ACTIVATIONS, repeat=3))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(2468)


def shape_of(mix: tuple[Activation, ...], layers: int = 5, **changes: Any) -> Shape:
    shape = Shape(BOUNDS, (*BOUNDS, layers), 2, 2, activations=(*mix, "recompute"))
    return shape._replace(**changes)


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_every_mix(monkeypatch: pytest.MonkeyPatch, mix: tuple[Activation, ...]) -> None:
    source = random.Random("-".join(mix))
    use_shape(
        monkeypatch,
        shape_of(
            mix, slots=source.choice([1, 2, 3]), boundary=source.choice(["device", "host"]),
            gradient_buffers=source.choice([1, 2]),
        ),
    )  # fmt: skip
    inject = random_delays(1) if source.random() < 0.5 else None
    check(deep_gpt(0.3, tied=False), token_batches(2, steps=2), clip_norm=0.5, inject=inject)


@pytest.mark.parametrize("how", ["keep", "offload"])
@pytest.mark.parametrize("tied", [True, False])
def test_many_micro_batches_and_shared_weights(
    monkeypatch: pytest.MonkeyPatch, how: Activation, tied: bool
) -> None:
    use_shape(monkeypatch, shape_of((how, "recompute", how)))
    steps = token_batches(1 if tied else 7, steps=2)
    check(deep_gpt(0.2, tied), steps, inject=random_delays(7))


@pytest.mark.parametrize("mix", [("keep",) * 3, ("offload",) * 3, ("offload", "keep", "recompute")])
def test_running_statistics(monkeypatch: pytest.MonkeyPatch, mix: tuple[Activation, ...]) -> None:
    use_shape(monkeypatch, shape_of(mix, 6))
    model = nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.GELU(),
        nn.Linear(6, 3),
    )  # fmt: skip
    steps, example = [pairs([4, 6, 5], 5) for _ in range(3)], pairs([6], 5)[0]
    check(model, steps, loss_of=sequential_loss, loss=regression, example=example)


@pytest.mark.parametrize("mix", [("keep",) * 3, ("offload",) * 3, ("keep", "offload", "keep")])
def test_skips(monkeypatch: pytest.MonkeyPatch, mix: tuple[Activation, ...]) -> None:
    use_shape(monkeypatch, shape_of(mix))
    steps = [
        [{"x": torch.randn(4, 6), "side": torch.randn(4, 6)} for _ in range(3)] for _ in range(2)
    ]
    check(Skips(), steps, loss_of=lambda model, batch: model(**batch), inject=random_delays(3))


@pytest.mark.parametrize("how", ["keep", "offload"])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, how: Activation) -> None:
    """The bits of recomputing, which are those of resident training."""
    steps = token_batches(3, steps=2)
    states = []
    for activation in ("recompute", how):
        torch.manual_seed(5)
        use_shape(monkeypatch, shape_of((activation,) * 3))  # type: ignore[arg-type]
        with swap(
            deep_gpt(0.2, tied=False), steps[0][0], AdamW,
            precision="bf16", micro_batches=3, inject=random_delays(2),
        ) as engine:  # fmt: skip
            losses = [engine.step(step) for step in steps]
            states.append((losses, {n: v.clone() for n, v in engine.state_dict().items()}))
    (losses, expected), (others, state) = states
    assert losses == others
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_one_choice_for_all_segments(how: Activation) -> None:
    engine = check(
        deep_gpt(0.1, tied=False), token_batches(3), micro_batches=3, segments=4, activations=how
    )
    # An embedding alone saves too little to be sent.
    assert set(engine.plan.activations[1:-1]) == {how}


def test_offloading_needs_less_memory_than_keeping_and_recomputes_nothing() -> None:
    steps = token_batches(4, steps=1)
    peaks = {}
    for how in ACTIVATIONS:
        options: dict[str, Any] = {"micro_batches": 4, "segments": 5, "activations": how}
        with swap(deep_gpt(0.0, tied=False), steps[0][0], **options) as engine:
            engine.step(steps[0])
            assert engine.last is not None
            peaks[how] = engine.last.device_peak_bytes
            assert len(engine.plan.recomputed) == {"recompute": 4, "keep": 0, "offload": 1}[how]
    assert peaks["offload"] < peaks["keep"]


def test_what_is_offloaded_takes_no_memory_of_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large head needs most: all that was offloaded has left by then, and comes back after it."""
    config = GPTConfig(layers=3, width=32, heads=1, head_width=32, vocabulary=2048, context=32)
    tokens = torch.randint(2048, (2, 33))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    bounds, measured, planned = (0, 1, 2, 3, 4), set(), set()
    for how in ("recompute", "offload"):
        activations: tuple[Activation, ...] = ("recompute", how, how, how, "recompute")
        use_shape(monkeypatch, Shape(bounds, (*bounds, 5), 1, 1, activations=activations))
        with swap(GPT(config), batch, micro_batches=2) as engine:
            engine.step([batch] * 2)
            assert engine.last is not None
            measured.add(engine.last.device_peak_bytes)
            planned.add(engine.plan.device_peak_bytes)
    assert len(measured) == len(planned) == 1


@pytest.mark.parametrize("how", ["recompute", "offload"])
def test_long_sequences_in_little_memory(how: Activation) -> None:
    """Nothing grows with the square of the length: one matrix of attention is twice the budget."""
    length, memory = 4096, 32 << 20
    config = GPTConfig(
        layers=3, width=32, heads=1, head_width=32, vocabulary=64, context=length, head_pieces=4
    )
    drawn = torch.randint(64, (1, length + 1))
    batch = {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}
    with atomtrain.swap(
        GPT(config), batch, optimizer=adamw, device="emulated:1GB/s", device_memory=memory,
        options=atomtrain.Options(activations=how),
    ) as engine:  # fmt: skip
        losses = [engine.step([batch]) for _ in range(3)]
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes <= memory
    assert memory < 4 * length**2
    assert losses[2] < losses[0]


class _Squared(torch.autograd.Function):
    """Hides what it needs from autograd's hooks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.value = value
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.value * gradient


class Hiding(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Squared.apply(super().forward(value))  # type: ignore[no-any-return, no-untyped-call]


def test_what_hides_from_the_hooks_is_recomputed() -> None:
    model = nn.Sequential(Hiding(5, 5), nn.Linear(5, 5), Hiding(5, 5), nn.Linear(5, 3))
    steps = [pairs([6, 4], 5) for _ in range(2)]
    engine = check(model, steps, loss_of=sequential_loss, loss=regression, segments=4)
    hiding = [i for i, how in enumerate(engine.plan.activations) if how != "recompute"]
    assert 0 not in hiding
    assert 2 not in hiding
    with pytest.raises(PlanError, match="hides from autograd's hooks"):
        swap(model, steps[0][0], loss=regression, micro_batches=2, segments=4, activations="keep")


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'recompute', 'keep', 'offload' or None"):
        atomtrain.Options(activations="cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("job_bytes", [0, 1000, 5000])
def test_small_and_large_ones(monkeypatch: pytest.MonkeyPatch, job_bytes: int) -> None:
    """All of such a model is small: here a part of it is, or nothing."""
    monkeypatch.setattr(offload, "_LEAST_JOB_BYTES", job_bytes)
    monkeypatch.setattr(offload, "_MOST_JOB_BYTES", job_bytes)
    use_shape(monkeypatch, shape_of(("offload", "offload", "offload")))
    check(
        deep_gpt(0.3, tied=False),
        token_batches(2, steps=2),
        clip_norm=0.5,
        inject=random_delays(job_bytes),
    )


class Repeated(nn.Module):
    """Layers that use the same weights again and again, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.second(self.first(x).relu()).tanh()
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_gradients_of_weights_that_a_segment_uses_often_are_planned(
    monkeypatch: pytest.MonkeyPatch, how: Activation
) -> None:
    use_shape(monkeypatch, Shape((0, 6), (0, 6, 7), 1, 1, activations=(how, "recompute")))
    example = {"x": torch.randn(4, 48)}
    with swap(Repeated(), example, loss=lambda output, _: output, micro_batches=2) as engine:
        engine.step([example, example])
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
