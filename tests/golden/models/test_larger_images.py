"""Images larger than the example's: planned anew, to the same bits, within what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.errors import ConfigError, PlanError
from tests.golden.models.test_any_model import adamw, loss_in
from tests.golden.models.test_front_parts import least_kib
from tests.support import vision_models
from tests.support.any_models import Case
from tests.support.compile_times import CompileTimes
from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin

pytestmark = pytest.mark.usefixtures("assumed_times", "fastest_plans")
LENGTH, MIB = 40, 1 << 20
GRIDS = [(2, 4), (4, 8), (8, 12)]
"""Patches of an image, in height and width: three sizes, each larger than the one before."""


def qwen_row(grid: tuple[int, int]) -> dict[str, Tensor]:
    """Return a sequence with one image of so many patches."""
    patches = grid[0] * grid[1]
    tokens = torch.randint(3, vision_models.IMAGE, (LENGTH,))
    tokens[2 : 2 + patches // 4] = vision_models.IMAGE
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens == vision_models.IMAGE, -100),
        "mm_token_type_ids": (tokens == vision_models.IMAGE).long(),
        "pixel_values": torch.randn(patches, 3 * 2 * vision_models.PATCH**2),
        "image_grid_thw": torch.tensor([[1, *grid]]),
    }


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return sequences as the model's forward takes them: images one behind the other."""
    images = ("pixel_values", "image_grid_thw")
    return {
        name: (torch.cat if name in images else torch.stack)([row[name] for row in rows])
        for name in rows[0]
    }


def steps(micro_batches: int = 1) -> list[list[dict[str, Tensor]]]:
    """Return steps with ever larger images, and one with small ones again."""
    sizes = [*GRIDS, GRIDS[0]]
    return [[collated([qwen_row(g), qwen_row(g)]) for _ in range(micro_batches)] for g in sizes]


def own_weight(module: nn.Module, _: Any, result: Tensor) -> Tensor:
    return result + module.proj.weight.mean()  # type: ignore[union-attr, operator]


def undivided() -> Case:
    """A tower that stays one layer, since a weight is used outside of its module."""
    case = vision_models.qwen3_vl()
    case.model.get_submodule("model.visual.patch_embed").register_forward_hook(own_weight)
    return case


@pytest.mark.parametrize(
    "make", [vision_models.qwen2_5_vl, vision_models.qwen3_vl, undivided],
    ids=lambda make: make.__name__,
)  # fmt: skip
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_steps_with_ever_larger_images(make: Callable[[], Case], micro_batches: int) -> None:
    model, _ = make()
    reference, batches = twin(model), steps(micro_batches)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, batches, resident, loss_in)
    torch.set_rng_state(state)
    peaks = []
    with swap(
        model, batches[0][0], optimizer=adamw, segments=3, micro_batches=micro_batches
    ) as engine:
        for batch, loss in zip(batches, expected, strict=True):
            assert engine.step(batch) == loss
            assert engine.last is not None
            assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
            peaks.append(engine.plan.device_peak_bytes)
        assert peaks[0] < peaks[1] < peaks[2] == peaks[3]
        assert_equal_training(engine, reference, resident)
        reference.eval()
        with torch.no_grad():
            judged = sum(float(loss_in(reference, b)) for b in batches[2]) / micro_batches
        assert engine.evaluate(batches[2]) == judged


def test_larger_images_in_an_evaluation() -> None:
    model, _ = vision_models.qwen2_5_vl()
    (small,), _, (large,), _ = steps()
    with swap(model, small, optimizer=adamw, segments=3) as engine:
        before = engine.plan.device_peak_bytes
        found = engine.evaluate([large])
        assert engine.plan.device_peak_bytes > before
        model.eval()
        with torch.no_grad():
            assert found == float(loss_in(model, large))
        model.train()


def test_trainer_takes_images_of_three_sizes(tmp_path: Path) -> None:
    model, _ = vision_models.qwen2_5_vl()
    reference = twin(model)
    rows = [qwen_row(grid) for grid in GRIDS for _ in range(4)]
    arguments = atomtrain.TrainerArguments(
        output_dir=tmp_path, micro_batch=2, max_steps=6, learning_rate=0.01, profile=False,
        schedule="constant", clip_norm=None,
    )  # fmt: skip
    device: dict[str, Any] = {"device": "emulated", "device_memory": "8MiB"}
    with atomtrain.Trainer(
        model, arguments, rows, data_collator=collated, optimizer=torch.optim.AdamW, **device
    ) as trainer:
        given = [trainer._batches(step) for step in range(6)]
        sizes = [len(batch["pixel_values"]) for (batch,) in given]
        assert len(set(sizes)) > len(GRIDS)
        assert max(sizes) > sizes[0], "the example's images are not the largest"
        trainer.train()
        resident = torch.optim.AdamW(reference.parameters(), lr=0.01)
        assert trainer.course.losses == train(reference, given, resident, loss_in)
        assert_equal_training(trainer.engine, reference, resident)


def test_what_does_not_fit_is_told_and_smaller_images_go_on() -> None:
    (small,), _, (large,), _ = steps()
    model, _ = vision_models.qwen2_5_vl()
    reference = twin(model)
    least = [least_kib(Case(model, lambda batch=batch: batch)) for batch in (small, large)]
    with swap(model, small, memory=f"{sum(least) // 2}KiB", optimizer=adamw) as engine:
        with pytest.raises(PlanError):
            engine.step([large])
        resident = adamw(reference.parameters())
        assert engine.step([small]) == train(reference, [[small]], resident, loss_in)[0]
        assert_equal_training(engine, reference, resident)


def test_auto_compiles_no_model_whose_images_may_become_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = CompileTimes()
    times.speed_ratio = 9.0
    times.install(monkeypatch)
    (small,), _, (large,), _ = steps()
    model, _ = vision_models.qwen2_5_vl()
    reference = twin(model)
    with swap(model, small, optimizer=adamw, compile="auto") as engine:
        assert not engine.compiling.compiled
        assert times.compiled == 0
        expected = train(reference, [[large]], adamw(reference.parameters()), loss_in)
        assert [engine.step([large])] == expected


def test_compiled_layers_want_the_largest_images_as_the_example() -> None:
    (small,), _, (large,), _ = steps()
    with (
        swap(vision_models.qwen2_5_vl().model, small, compile=True) as engine,
        pytest.raises(ConfigError, match="swap the model with its largest images as the example"),
    ):
        engine.step([large])
