"""Recipes of axolotl and LLaMA-Factory become recipes of ATOM; the rest is listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.main import main
from atomtrain.errors import ConfigError
from atomtrain.training.config.imported import KNOWN, imported
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe_files import options_with, read_recipe

AXOLOTL = """\
base_model: org/model-1B
load_in_4bit: true
datasets:
  - path: rows.jsonl
    type: alpaca
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj]
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
weight_decay: 0.0
wandb_project:
trust_remote_code: true
special_tokens: {pad_token: end}
"""
LLAMA_FACTORY = """\
model_name_or_path: org/model-8B
stage: dpo
pref_beta: 0.2
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: dpo_en_demo
cutoff_len: 1024
output_dir: saves/dpo
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
max_steps: 200
warmup_ratio: 0.1
bf16: true
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "other.yml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("modules", "targets"),
    [
        ("lora_target_modules: [q_proj]", "q_proj+gate_up_proj+down_proj"),
        ("lora_target_linear: true", "all-linear+gate_up_proj+down_proj"),
    ],
)
def test_experts_that_axolotl_names_are_targets(tmp_path: Path, modules: str, targets: str) -> None:
    named = "lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    text = f"base_model: org/model\nadapter: lora\nlora_r: 8\n{modules}\n{named}\n"
    found = imported(written(tmp_path, text))
    assert found.values["lora"] == f"r=8,targets={targets}"
    assert not any("lora_target" in line for line in found.left_out)


@pytest.mark.parametrize(
    ("said", "init"),
    [
        ("peft_init_lora_weights: olora", ",init=olora"),
        ("peft_init_lora_weights: pissa_niter_8", ",init=pissa_niter_8"),
        ("peft_init_lora_weights: true", ""),
        ("peft_init_lora_weights: false", ""),
        ("pissa_init: true", ",init=pissa_niter_16"),
        ("pissa_init: true\npissa_iter: 4", ",init=pissa_niter_4"),
        ("pissa_init: true\npissa_iter: -1", ",init=pissa"),
        ("pissa_init: false", ""),
    ],
)
def test_how_adapters_begin_and_noise_on_embeddings(tmp_path: Path, said: str, init: str) -> None:
    text = f"base_model: org/model\nadapter: lora\nlora_r: 8\nneftune_noise_alpha: 5\n{said}\n"
    found = imported(written(tmp_path, text))
    assert TrainOptions(**found.values) == TrainOptions(
        model="org/model", lora=f"r=8{init}", neftune_noise_alpha=5.0
    )
    assert found.left_out == []


@pytest.mark.parametrize("key", ["lora_modules_to_save", "additional_target"])
def test_modules_that_are_trained_themselves(tmp_path: Path, key: str) -> None:
    text = f"base_model: org/model\nadapter: lora\nlora_r: 8\n{key}: [embed_tokens, lm_head]\n"
    found = imported(written(tmp_path, text))
    assert found.values["lora"] == "r=8,modules_to_save=embed_tokens+lm_head"
    assert found.left_out == []


def test_a_beginning_that_adapters_do_not_have_is_left_out(tmp_path: Path) -> None:
    text = "base_model: org/model\nadapter: lora\nlora_r: 8\npeft_init_lora_weights: eva\n"
    found = imported(written(tmp_path, text))
    assert TrainOptions(**found.values) == TrainOptions(model="org/model", lora="r=8")
    assert found.left_out == ["peft_init_lora_weights: 'eva' has no counterpart"]


def test_axolotl(tmp_path: Path) -> None:
    found = imported(written(tmp_path, AXOLOTL))
    assert TrainOptions(**found.values) == TrainOptions(
        model="org/model-1B", data=("rows.jsonl",), epochs=1.0, sequences=8, micro_batch=2,
        context=2048, packing=True,
        lora="r=32,alpha=16,targets=gate_proj+down_proj,bits=4,dropout=0.05",
        learning_rate=2e-4, warmup_steps=10, weight_decay=0.0, optimizer="adamw-int8",
        schedule="cosine",
    )  # fmt: skip
    keys = [line.partition(":")[0] for line in found.left_out]
    assert keys == ["gradient_checkpointing", "trust_remote_code", "special_tokens"]


def test_llama_factory(tmp_path: Path) -> None:
    found = imported(written(tmp_path, LLAMA_FACTORY))
    assert TrainOptions(**found.values) == TrainOptions(
        model="org/model-8B", objective="dpo", beta=0.2, lora="r=8,alpha=16", context=1024,
        steps=200, directory=Path("saves/dpo"), sequences=8, micro_batch=1, learning_rate=5e-6,
        warmup_ratio=0.1, precision="bf16",
    )  # fmt: skip
    (line,) = found.left_out
    assert "dpo_en_demo" in line
    assert "--data" in line


def test_several_sets_and_those_to_measure_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = "[{path: a.jsonl}, {path: org/b, name: en, shards: 4}, {path: a.jsonl}]"
    judged = "[{path: json, data_files: [c.jsonl, d.jsonl]}]"
    text = f"base_model: org/m\ndatasets: {sets}\ntest_datasets: {judged}\n"
    found = imported(written(tmp_path, text))
    assert found.values["data"] == ("a.jsonl:2", "datasets:org/b:en:train")
    assert found.values["validation"] == "c.jsonl,d.jsonl"
    assert found.left_out == ["datasets: shards of org/b: all rows are taken"]
    (tmp_path / "data").mkdir()
    table = {"x": {"file_name": "x.json"}, "y": {"hf_hub_url": "org/y", "split": "test"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    text = "model_name_or_path: org/m\ndataset: x, z\neval_dataset: y\n"
    found = imported(written(tmp_path, text + "interleave_probs: 0.5,0.5\nval_size: 0.1\n"))
    assert found.values["data"] == (str(Path("data/x.json")),)
    assert found.values["validation"] == "datasets:org/y:test"
    assert [line.partition(":")[0] for line in found.left_out] == ["dataset", "interleave_probs"]


@pytest.mark.parametrize(
    ("text", "objective", "beta", "gamma"),
    [
        ("base_model: org/m\nrl: orpo\norpo_alpha: 0.2\n", "orpo", 0.2, None),
        ("base_model: org/m\nrl: simpo\nrl_beta: 2.5\nsimpo_gamma: 0.5\n", "simpo", 2.5, 0.5),
        (
            "model_name_or_path: org/m\nstage: dpo\npref_loss: simpo\nsimpo_gamma: 1\n",
            "simpo", None, 1.0,
        ),
        ("model_name_or_path: org/m\nstage: dpo\npref_loss: ipo\n", None, None, None),
        ("model_name_or_path: org/m\nstage: rm\npref_beta: 0.1\n", "reward", None, None),
    ],
    ids=[
        "axolotl orpo", "axolotl simpo", "llama-factory simpo", "llama-factory ipo",
        "llama-factory rm",
    ],
)  # fmt: skip
def test_objectives_of_pairs(
    text: str, objective: str | None, beta: float | None, gamma: float | None, tmp_path: Path
) -> None:
    found = imported(written(tmp_path, text))
    options = TrainOptions(**found.values)
    assert (options.objective, options.beta, options.gamma) == (objective, beta, gamma)
    told = [line for line in found.left_out if "objective" in line]
    assert bool(told) == (objective is None)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("- a\n", "is not a recipe"),
        ("a: [1\n", "cannot be read as YAML"),
        ("micro_batch_size: two\n", "micro_batch_size must be a whole number, not 'two'"),
        ("sample_packing: 3\n", "sample_packing must be true or false, not 3"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nlora_r: [*b, *b]\n", "has aliases"),
        ("# " + "x" * (1 << 20), "larger than 1 MiB"),
        ("micro_batch_size: 2.5\n", "micro_batch_size must be a whole number, not 2.5"),
        ("seed: .inf\n", "seed must be a whole number"),
        ("base_model: [a, b]\n", "base_model must be a text"),
        ("rl_beta: much\n", "rl_beta must be a number"),
        ("adapter: lora\nlora_target: 5\n", "lora_target must be a list of names, not 5"),
        ("dataset: 5\n", "dataset must be names of data sets, not 5"),
        ("datasets: [[a]]\n", "path must be the name of a data set or a file"),
        ("!!python/object/apply:os.system ['true']\n", "cannot be read as YAML"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path, text: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=needed) as caught:
        imported(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_the_command_writes_what_atom_train_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = written(tmp_path, AXOLOTL), tmp_path / "recipe.yaml"
    assert main(["import", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert f"start with: atom train {out}" in said.out
    assert "left out: gradient_checkpointing" in said.err
    read = options_with(read_recipe(out), {})
    assert read == TrainOptions(**imported(path).values)
    assert main(["import", str(path), "--out", str(out)]) == 2
    assert main(["import", str(tmp_path / "nowhere.yml")]) == 2
    assert main(["import", str(path)]) == 0
    assert "micro-batch: 2" in capsys.readouterr().out


def test_columns_of_one_s_own_are_told(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(
        "base_model: tiny\ndatasets:\n  - path: a.jsonl\n    type: {field_instruction: question}\n"
    )
    found = imported(file)
    assert found.values["data"] == ("a.jsonl",)
    assert found.left_out == ["datasets: type of a.jsonl: rows need the names of the docs"]


@pytest.mark.parametrize(
    ("said", "values"),
    [
        ("num_epochs: 3\nwarmup_ratio: 0.03", {"epochs": 3.0, "warmup_ratio": 0.03}),
        ("num_epochs: 3\nwarmup_steps: 0.1", {"epochs": 3.0, "warmup_ratio": 0.1}),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", {"warmup_ratio": 0.1}),
        ("warmup_steps: 9\nwarmup_ratio: 0.1", {"warmup_steps": 9}),
        ("max_steps: -1\nnum_train_epochs: 2", {"epochs": 2.0}),
        ("optimizer: adamw_torch_fused\nlr_scheduler: cosine",
         {"optimizer": "adamw", "schedule": "cosine"}),
        ("reward_model: true", {"objective": "reward"}),
        ("finetuning_type: lora\nlora_rank: 64", {"lora": "r=64,alpha=128"}),
        ("adapter: lora\nlora_r: 64\nlora_alpha: 16", {"lora": "r=64,alpha=16"}),
        ("datasets: org/rows-2.5", {"data": ("datasets:org/rows-2.5",)}),
        ("datasets:\n  path: ./rows\n  type: alpaca", {"data": ("./rows",)}),
        ("datasets:\n  - {path: json, data_files: {train: a.jsonl}, type: chat_template}",
         {"data": ("a.jsonl",)}),
        ("datasets:\n  - {path: json, data_files: {train: a.jsonl, test: b.jsonl}, split: test}",
         {"data": ("b.jsonl",)}),
        ("torch_compile: auto\nbf16: auto\npacking: auto", {}),
        ("lora_rank: 64", {"lora": "r=64,alpha=128"}),
        ("datasets:\n  - {path: a.jsonl, field_messages: conversations, ds_type: json}",
         {"data": ("a.jsonl",)}),
        ("datasets: [{path: org/a, split: 'train[:95%]'}]\n"
         "test_datasets: [{path: org/a, split: 'train[95%:]'}]",
         {"data": ("datasets:org/a:train[:95%]",), "validation": "datasets:org/a:train[95%:]"}),
    ],
)  # fmt: skip
def test_styles_that_are_understood_wholly(
    tmp_path: Path, said: str, values: dict[str, Any]
) -> None:
    found = imported(written(tmp_path, f"base_model: org/m\n{said}\n"))
    assert TrainOptions(**found.values) == TrainOptions(model="org/m", **values)
    assert found.left_out == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("optimizer: lion_8bit", "optim: 'lion_8bit' has no counterpart; known are adamw"),
        ("lr_scheduler: rex", "lr_scheduler: 'rex' has no counterpart"),
        ("save_steps: 0.25", "save_steps: 0.25: a part of all steps"),
        ("max_steps: 5\nnum_epochs: 2", "num_epochs: 2: max_steps counts more"),
        ("report_to: wandb", "report_to: 'wandb': give --metrics"),
        ("evals_per_epoch: 4", "evals_per_epoch: 4: give --evaluate-every N"),
        ("val_set_size: 0", "val_set_size: 0: a twentieth of the rows is held out"),
        (
            "datasets: [{path: a.jsonl, split: 'train[:5%]'}]",
            "of a.jsonl: all rows are taken",
        ),
        (
            "datasets: [{path: org/a, split: 'train[-9:]'}]",
            "datasets: 'train[-9:]' of org/a has no counterpart; left out",
        ),
        ("lora_r: 8", "lora_r: 8: it is for adapters"),
        ("load_in_8bit: true", "load_in_8bit: True: it is for adapters"),
        ("datasets: [{path: a.jsonl, type: oasst}]", "type of a.jsonl: rows need the names"),
        ("datasets: [{path: a.jsonl, field_messages: talk}]", "field_messages of a.jsonl: 'talk'"),
        ("datasets: [{path: org/a, data_files: b.jsonl}]", "data_files of org/a: all its files"),
        (f"special_tokens: {{pad_token: {'x' * 99}}}", "x... has no counterpart"),
    ],
)
def test_what_is_not_understood_is_told(tmp_path: Path, said: str, told: str) -> None:
    found = imported(written(tmp_path, f"base_model: org/m\n{said}\n"))
    TrainOptions(**found.values)
    (line,) = found.left_out
    assert told in line


def test_a_data_set_of_another_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    table = {"x": {"ms_hub_url": "org/x", "tags": {"role_tag": "role"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    found = imported(written(tmp_path, "model_name_or_path: org/m\ndataset: x\n"))
    assert found.values == {"model": "org/m"}
    assert [line.partition(" ")[0] for line in found.left_out] == ["dataset:", "dataset:"]
    assert "give its file with --data" in found.left_out[1]


ODD = ("5", "-1", "0.5", "a b", "[1]", "[[a]]", "{a: 1}", "true", "''", ".nan", ".inf", "9" * 400,
       "2024-01-01", "[{path: 5}]", "{path: [a]}")  # fmt: skip


@pytest.mark.parametrize("key", sorted({*KNOWN, "adapter", "unknown"}))
def test_no_value_of_a_key_is_answered_with_a_traceback(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for odd in ODD:
        beside = "" if key == "adapter" else "adapter: lora\n"
        path = written(tmp_path, f"base_model: tiny\n{beside}{key}: {odd}\n")
        code, told = main(["import", str(path)]), capsys.readouterr()
        lines = told.err.splitlines()
        assert all(line.startswith("atom: ") and len(line) < 600 for line in lines), (odd, lines)
        assert code == 0 or (code == 2 and len(lines) == 1 and not told.out), (odd, lines)
