"""The recipe: resolved once, carried unchanged, amended only where that is safe."""

from __future__ import annotations

import json

import pytest

from atomtrain.cli.train import arguments_of
from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.models import PRESETS
from atomtrain.training.config.new_recipe import amended, new_recipe
from atomtrain.training.config.optimizing import host_bytes_per_parameter
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe


def test_how_often_peers_average_is_measured_unless_it_is_said() -> None:
    recipe = new_recipe(TrainOptions(model="tiny"))
    assert recipe.local_steps == 0
    fixed = amended(recipe, TrainOptions(local_steps=5), "here")
    assert (fixed.local_steps, amended(fixed, TrainOptions(), "here").local_steps) == (5, 5)
    assert amended(fixed, TrainOptions(measured_rounds=True), "here").local_steps == 0


def test_json_round_trip() -> None:
    recipe = new_recipe(TrainOptions(model="tiny", dropout=0.1, seed=3))
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_model_keeps_its_published_sizes(name: str) -> None:
    recipe = new_recipe(TrainOptions(model=name))
    assert recipe.sizes == PRESETS[name]
    assert recipe.context == PRESETS[name].context


@pytest.mark.parametrize("change", [{"format": 99}, {"steps": None, "extra": 1}, {"sizes": 5}])
def test_what_is_no_recipe_is_refused(change: dict[str, object]) -> None:
    data = new_recipe(TrainOptions()).to_json()
    with pytest.raises(CheckpointError):
        Recipe.from_json({**data, **change})


def test_the_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    recipe = new_recipe(TrainOptions(steps=100, learning_rate=1.0))
    rates = [recipe.learning_rate_at(step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / recipe.warmup_steps)
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == recipe.warmup_steps - 1
    falling = rates[recipe.warmup_steps :]
    assert falling == sorted(falling, reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_amending_takes_what_may_differ() -> None:
    recipe = new_recipe(TrainOptions(model="tiny", steps=10))
    longer = amended(recipe, TrainOptions(steps=20, sequences=4), "here")
    assert (longer.steps, longer.sequences) == (20, 4)
    assert longer.sizes == recipe.sizes


@pytest.mark.parametrize(
    "options",
    [
        {"model": "demo"}, {"dropout": 0.5}, {"seed": 1}, {"context": 32}, {"vocabulary": 100},
        {"precision": "bf16"}, {"gradient_dtype": "float32"},
        {"clip_norm": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_amending_refuses_what_must_not(options: dict[str, object]) -> None:
    recipe = new_recipe(TrainOptions(model="tiny"))
    flag = next(iter(options)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{flag} .*contradicts there"):
        amended(recipe, TrainOptions(**options), "there")


def test_the_type_of_gradients_belongs_to_the_recipe() -> None:
    options = TrainOptions(model="tiny", precision="bf16", gradient_dtype="float32")
    recipe = new_recipe(options)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert amended(recipe, TrainOptions(gradient_dtype="float32"), "there") == recipe
    older = {k: v for k, v in new_recipe(TrainOptions()).to_json().items() if k != "gradient_dtype"}
    assert Recipe.from_json(older).gradient_dtype is None
    with pytest.raises(ConfigError, match="float32"):
        new_recipe(TrainOptions(gradient_dtype="float64"))
    bytes_each = [
        host_bytes_per_parameter("adamw", precision, dtype)
        for precision in ("fp32", "bf16")
        for dtype in (None, "float32")
    ]
    assert bytes_each == [16, 16, 16, 18]


def test_the_demo_has_two_peers_and_everything_else_one() -> None:
    assert TrainOptions().n_peers == 2
    for options in (
        TrainOptions(model="tiny"),
        TrainOptions(run="mine"),
        TrainOptions(data=("x",)),
        TrainOptions(join=("a@b",)),
    ):
        assert options.n_peers == 1
    assert TrainOptions(run="mine", peers=3).n_peers == 3


def test_only_a_named_run_is_open_to_other_machines() -> None:
    assert TrainOptions().listen_host == "127.0.0.1"
    assert TrainOptions(run="mine").listen_host == "0.0.0.0"
    assert TrainOptions(join=("a@b",)).listen_host == "0.0.0.0"
    assert TrainOptions(host="192.0.2.7").listen_host == "192.0.2.7"


def test_options_survive_the_way_to_a_peer_process() -> None:
    from atomtrain.cli.parsing import parse

    options = TrainOptions(
        model="tiny", join=("r@/ip4/1.2.3.4/tcp/5/p2p/x", "r@b"), resume=True, run="r",
        prompt="-- and so", learning_rate=1e-3, device_memory="1MiB",
    )  # fmt: skip
    again = parse(TrainOptions, arguments_of(options), prog="p", about="", examples="")
    assert again.join == options.join
    assert (again.prompt, again.resume, again.learning_rate) == ("-- and so", True, 1e-3)


@pytest.mark.parametrize("native", ["fp32", "bf16", "fp16"])
def test_a_recipe_holds_the_precision_that_auto_stands_for(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "atomtrain.engine.devices.native.native_precision", lambda d: asked.append(d) or native
    )
    for options in (TrainOptions(device="cpu"), TrainOptions(device="cpu", precision="auto")):
        assert new_recipe(options).precision == native
    assert asked == ["cpu", "cpu"]
    assert new_recipe(TrainOptions(precision="fp32")).precision == "fp32"
    averaged = TrainOptions(run="r", average="gradient", target_batch_tokens=64)
    assert new_recipe(averaged).precision == "fp32", "gradients are averaged in float32"


def test_auto_keeps_what_a_run_has() -> None:
    recipe = new_recipe(TrainOptions(model="tiny", precision="bf16"))
    for joins in (True, False):
        assert amended(recipe, TrainOptions(precision="auto"), "here", joins=joins) == recipe
        assert amended(recipe, TrainOptions(), "here", joins=joins) == recipe


def test_no_recipe_says_auto() -> None:
    data = new_recipe(TrainOptions()).to_json()
    with pytest.raises(CheckpointError, match="no precision 'auto'"):
        Recipe.from_json({**data, "precision": "auto"})
