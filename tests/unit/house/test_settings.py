"""Settings: declared once by their owner, asked for elsewhere, checked in both places."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.settings import asked, asked_of, check_fields, chosen, count, one_of, option
from atomtrain.swarm import Endpoint, Rules, SwarmConfig
from atomtrain.training.config.new_recipe import amended, new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import FIXED, Recipe


@dataclass(frozen=True, kw_only=True)
class Oven:
    heat_degrees: int = option(180, "How hot.", "N", check=count(50, 250))
    mode: str = option("top", "Which side.", "NAME", check=one_of(("top", "below")))
    depth: int = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    heat: int | None = asked(Oven, "heat_degrees")
    mode: str | None = asked(Oven, "mode")
    own: int | None = option(None, "Another one.", "N", check=count())

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_command_takes_the_declaration_over() -> None:
    heat = next(field for field in dataclasses.fields(Asked) if field.name == "heat")
    assert (heat.metadata["help"], heat.metadata["metavar"]) == ("How hot.", "N")
    assert list(asked_of(Asked, Oven)) == [("heat", "heat_degrees"), ("mode", "mode")]
    assert chosen(Asked(heat=200, own=1), Oven) == {"heat_degrees": 200}
    assert Oven(**chosen(Asked(mode="below"), Oven)) == Oven(mode="below")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"heat": 300}, "--heat must be at most 250, not 300"),
        ({"heat": 20}, "--heat must be at least 50, not 20"),
        ({"mode": "belw"}, "--mode 'belw' does not exist; choose top or below. Did you mean"),
        ({"own": 0}, "--own must be at least 1, not 0"),
    ],
)
def test_what_the_owner_refuses_is_refused_by_the_name_that_was_given(
    given: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Asked(**given)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_an_owner_names_its_own_field() -> None:
    with pytest.raises(ConfigError, match=r"^oven heat_degrees must be at most 250"):
        check_fields(Oven(heat_degrees=300), "oven ")
    check_fields(Oven(heat_degrees=300), "oven ", besides=("heat_degrees",))


@pytest.mark.parametrize("owner", [Recipe, Rules, Endpoint, SwarmConfig, Options])
def test_what_is_declared_with_a_help_text_can_be_given_to_train(owner: type) -> None:
    told = {field.name for field in dataclasses.fields(owner) if "help" in field.metadata}
    assert told == {theirs for _, theirs in asked_of(TrainOptions, owner)}


OTHERS = {
    "model": "demo", "context": 8, "clip_norm": 0.5, "seed": 3, "optimizer": "muon",
    "precision": "bf16", "gradient_dtype": "float32", "lora": "r=2", "objective": "dpo",
    "beta": 0.2, "gamma": 0.5, "warmup_steps": 7, "weight_decay": 0.3,
    "layer_lr_decay": 0.9, "neftune_noise_alpha": 5.0,
}  # fmt: skip


def test_what_is_fixed_is_refused_on_resuming() -> None:
    fixed = {f.name for f in dataclasses.fields(Recipe) if f.metadata.get("on_resume") == FIXED}
    assert fixed | {"precision"} == set(OTHERS)
    recipe = new_recipe(TrainOptions(model="tiny"))
    for name, other in OTHERS.items():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .*contradicts here"):
            amended(recipe, TrainOptions(**{name: other}), "here")  # type: ignore[arg-type]


def test_who_joins_may_compute_in_another_precision_and_nothing_else() -> None:
    recipe = new_recipe(TrainOptions(model="tiny", precision="fp32"))
    found = amended(recipe, TrainOptions(precision="fp16"), "here", joins=True)
    assert found == dataclasses.replace(recipe, precision="fp16")
    for name in set(OTHERS) - {"precision"}:
        given = TrainOptions(**{name: OTHERS[name]})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="contradicts here"):
            amended(recipe, given, "here", joins=True)
