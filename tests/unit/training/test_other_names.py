"""Options under the names of other tools: taken as what they mean, and the user is told."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.train import command_parser, options_of
from atomtrain.errors import ConfigError
from atomtrain.settings import flag_of
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.other_names import ADVICE, KINDS, translated
from atomtrain.training.config.recipe_files import options_with, read_recipe


def test_a_command_line_of_transformers_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    given = (
        "--per_device_train_batch_size 4 --gradient-accumulation-steps 2 --lr 3e-4 --bf16 True "
        "--optim adamw_bnb_8bit --max_steps 100 --warmup_ratio 0.03 --lr_scheduler_type linear "
        "--max-grad-norm 0.5 --save_steps 50 --eval-steps 25"
    )
    options = options_of(given.split())
    assert (options.micro_batch, options.sequences, options.steps) == (4, 8, 100)
    assert (options.learning_rate, options.warmup_ratio, options.schedule) == (3e-4, 0.03, "linear")
    assert (options.precision, options.optimizer) == ("bf16", "adamw-int8")
    assert (options.clip_norm, options.checkpoint_every, options.evaluate_every) == (0.5, 50, 25)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--per-device-train-batch-size 4 --gradient-accumulation-steps 2" in told
    assert "is taken as" in told
    assert "--micro-batch 4 --sequences 8" in told


def test_own_names_are_not_commented_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert options_of(["--learning-rate", "1e-4", "--warmup-steps", "3"]).warmup_steps == 3
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "known", "expected"),
    [
        ({"batch_size": 4}, {}, {"micro_batch": 4, "sequences": 4}),
        ({"batch_size": 4}, {"sequences": 12}, {"micro_batch": 4}),
        ({"gradient_accumulation": 3}, {"sequences": 12}, {"micro_batch": 4}),
        ({"gradient_accumulation": 3}, {"micro_batch": 2}, {"sequences": 6}),
        ({"num_train_epochs": 3.0}, {}, {"epochs": 3.0}),
        ({"fp16": True}, {}, {"precision": "fp16"}),
        ({"bf16": False}, {}, {}),
        ({"max_steps": -1, "num_epochs": 2.0}, {}, {"epochs": 2.0}),
    ],
)
def test_what_names_mean_depends_on_what_else_is_known(
    said: dict[str, Any], known: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert translated(said, known).values == expected


@pytest.mark.parametrize(
    ("said", "known", "needed"),
    [
        ({"lr": 1.0}, {"learning_rate": 2.0}, "--lr 1.0 and --learning-rate 2.0 contradict"),
        ({"batch_size": 2, "per_device_train_batch_size": 3}, {}, None),
        ({"batch_size": 0}, {}, "--batch-size must be at least 1, not 0"),
        ({"gradient_accumulation": 4}, {}, "--gradient-accumulation 4 needs"),
        ({"gradient_accumulation": 4}, {"sequences": 6}, "--gradient-accumulation 4 needs"),
        ({"batch_size": 4, "gradient_accumulation": 2}, {"sequences": 12}, "contradict"),
        ({"bf16": True, "fp16": True}, {}, "contradict"),
        ({"optim": "lion"}, {}, "--optim 'lion' is not known"),
        ({"lr_scheduler_type": "cosin"}, {}, "Did you mean 'cosine'"),
    ],
)
def test_what_cannot_be_is_refused(
    said: dict[str, Any], known: dict[str, Any], needed: str | None
) -> None:
    with pytest.raises(ConfigError, match=needed):
        translated(said, known)


def test_not_a_number_does_not_contradict_itself() -> None:
    assert math.isnan(translated({"num_train_epochs": math.nan}, {}).values["epochs"])


def test_advice_names_options_that_there_are() -> None:
    ours = {flag for flag in command_parser()._option_string_actions if "=" not in flag}
    for name, advice in ADVICE.items():
        assert name not in KINDS
        flags = set(re.findall(r"(?<!atom export )--[a-z-]+", advice))
        assert flags <= ours, (name, advice)
        with pytest.raises(ConfigError, match=re.escape(advice)):
            options_of([f"--{name}"])


def test_a_recipe_may_use_them_and_the_command_line_counts_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: tiny\nper_device_train_batch_size: 2\nmax-steps: 50\nsequences: 6\n")
    recipe = read_recipe(path)
    assert recipe.values == {"model": "tiny", "micro_batch": 2, "steps": 50, "sequences": 6}
    assert recipe.lines["steps"] == 3
    options = options_of([str(path), "--max-steps", "9", "--batch-size", "3"])
    assert (options.steps, options.micro_batch, options.sequences) == (9, 3, 6)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" --")[0] for line in told] == [f"atom: {path}:", "atom:"]
    path.write_text("model: tiny\nmax-steps: 0\n")
    with pytest.raises(ConfigError, match=rf"{path}:2: --steps must be"):
        options_with(read_recipe(path), {})
    path.write_text("model: tiny\noptim: lion\n")
    with pytest.raises(ConfigError, match=rf"{path}:2: --optim 'lion'"):
        read_recipe(path)


def test_steps_and_epochs_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--steps and --epochs"):
        options_of(["--steps", "3", "--epochs", "1"])
    with pytest.raises(ConfigError, match="--epochs must be above 0"):
        options_of(["--epochs", "0"])
    with pytest.raises(ConfigError, match="--epochs is for new runs"):
        options_of(["--epochs", "1", "--run", "mine", "--resume"])


def test_options_may_be_written_as_other_tools_write_them() -> None:
    options = options_of(
        [
            "--learning_rate",
            "1e-4",
            "--packing",
            "True",
            "--plain=True",
            "--compile",
            "False",
            "--clip_norm=2",
        ]
    )
    assert (options.learning_rate, options.packing, options.plain) == (1e-4, True, True)
    assert (options.compile, options.clip_norm) == (False, 2.0)
    assert not options_of(["--plain", "--plain", "False"]).plain
    assert options_of(["--data", "a_b=True", "--run=x_True"]).data == ("a_b=True",)
    with pytest.raises(ConfigError, match="no recipe '--local_steps'"):
        options_of(["--", "--local_steps"])


def test_a_part_of_the_steps_to_warm_up_in(tmp_path: Path) -> None:
    options = options_of(["--model", "tiny", "--steps", "101", "--warmup_ratio", "0.1"])
    assert new_recipe(options).warmup_steps == 11
    for rest in ("--warmup-steps 3", "--run mine --resume", "--join a@b"):
        with pytest.raises(ConfigError, match="--warmup-ratio"):
            options_of(["--warmup-ratio", "0.1", *rest.split()])
    path = tmp_path / "recipe.yaml"
    path.write_text("model: tiny\nsteps: 50\nwarmup-steps: 5\n")
    options = options_of([str(path), "--epochs", "2", "--warmup-ratio", "0.2"])
    assert (options.steps, options.warmup_steps) == (None, None)
    assert (options.epochs, options.warmup_ratio) == (2.0, 0.2)
    path.write_text("model: tiny\nepochs: 2\nwarmup-ratio: 0.2\n")
    for begun in ("--run mine --resume", "--join mine@/ip4/192.0.2.1/tcp/1/p2p/a"):
        options = options_of([str(path), *begun.split()])
        assert (options.epochs, options.warmup_ratio) == (None, None), "the run has its own"


@pytest.mark.slow
def test_every_name_of_transformers_is_understood_or_answered() -> None:
    arguments = pytest.importorskip("transformers.training_args").TrainingArguments
    ours = set(command_parser()._option_string_actions)
    names = {field.name for field in dataclasses.fields(arguments)}
    assert len(names) > 100
    assert {name for name in names - {*KINDS, *ADVICE} if flag_of(name) not in ours} == set()
