"""Layers that learn at rates of their own: bit for bit as an ordinary loop with groups."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from atomtrain.errors import ConfigError
from atomtrain.models.lora import add_adapters
from atomtrain.models.lora_config import LoraConfig
from atomtrain.optimizers import layer_groups
from atomtrain.optimizers.groups import decay_groups, set_learning_rate
from atomtrain.training.config.optimizing import named_optimizer
from atomtrain.training.trainer.trainer import Trainer
from atomtrain.training.trainer.trainer_arguments import TrainerArguments
from tests.support.engine_models import gpt, swap, tokens
from tests.support.hugging_face_models import (
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)
from tests.support.reference import train as resident

RATE, DECAY = 1e-2, 0.5


def factors(model: nn.Module, decay: float = DECAY) -> dict[str, float]:
    """Return each parameter's factor by name."""
    groups = layer_groups(model, decay_groups(model), decay, 1.0)
    by_id = {id(p): group["lr_factor"] for group in groups for p in group["params"]}
    assert all(group["lr"] == group["lr_factor"] for group in groups)
    return {name: by_id[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_layers_nearer_the_input_learn_more_slowly() -> None:
    found = factors(gpt(layers=3))
    assert found["embedding.token.weight"] == found["embedding.position.weight"] == DECAY**4
    assert found["blocks.0.qkv.bias"] == DECAY**3
    assert found["blocks.2.mlp_in.weight"] == DECAY
    assert found["head.norm.weight"] == 1


def test_the_largest_list_of_layers_counts_and_lists_inside_do_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
            experts = (nn.ModuleList(nn.Linear(4, 4) for _ in range(9)) for _ in range(2))
            self.layers = nn.ModuleList(nn.ModuleDict({"experts": each}) for each in experts)
            self.head = nn.Linear(4, 2)

    found = factors(Model())
    assert found["tower.4.weight"] == found["tower.0.bias"] == DECAY**3
    assert found["layers.0.experts.8.weight"] == DECAY**2
    assert (found["layers.1.experts.0.weight"], found["head.bias"]) == (DECAY, 1)
    whole = factors(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    assert (whole["0.weight"], whole["2.bias"]) == (DECAY**3, DECAY)
    shared = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    shared[2].weight = shared[0].weight
    assert factors(shared)["0.weight"] == DECAY**3, "where it is named first"
    with pytest.raises(ConfigError, match="needs a model with a list of layers"):
        factors(nn.Linear(2, 2))
    assert layer_groups(nn.Linear(2, 2), groups := [{"params": []}], 1.0, 1.0) == groups


def test_adapters_are_of_their_layer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = factors(add_adapters(write_model(tmp_path, UNTIED), LoraConfig(r=2)))
    assert found["model.layers.0.self_attn.q_proj.lora_A.weight"] == DECAY**3
    assert found["model.layers.2.mlp.up_proj.lora_B.weight"] == DECAY


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("name", ["adamw", "adamw-bfloat16", "adamw-int8", "muon", "sgd"])
def test_swapped_groups_are_those_of_an_ordinary_loop_bit_for_bit(name: str) -> None:
    model, steps = gpt(layers=3, width=64), [[tokens()] for _ in range(4)]
    expected = copy.deepcopy(model)

    def optimizer_of(owned: nn.Module, decay: float = DECAY) -> torch.optim.Optimizer:
        return named_optimizer(owned, name, learning_rate=RATE, layer_lr_decay=decay)

    losses = []
    optimizer = optimizer_of(expected)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in steps:
        losses += resident(expected, [step], optimizer)
        schedule.step()
    alike = resident(copy.deepcopy(model), steps[:2], optimizer_of(copy.deepcopy(model), 1.0))
    assert alike[0] == losses[0]
    with swap(
        model, steps[0][0], memory="700KiB", optimizer=lambda _: optimizer_of(model), segments=3
    ) as engine:
        found = []
        for index, step in enumerate(steps):
            set_learning_rate(engine.optimizer.param_groups, RATE * (1 / (1 + index)))
            found.append(engine.step(step))
        rates = {group["lr"] for group in engine.optimizer.param_groups}
        assert len(rates) == 5
        engine.synchronize()
    assert found == losses
    for key, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(key), parameter), key


@pytest.mark.usefixtures("no_search_for_a_fit")
def test_a_run_resumes_with_the_same_bits_and_learns_by_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from atomtrain.cli.main import main

    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    before = dict(write_model(folder, UNTIED).named_parameters())
    train = partial(train_by_command, memory="2MiB", sequences=2, steps=3)
    options = ("--layer-lr-decay", "0.1", "--checkpoint-every", "1", "--weight-decay", "0")
    run = train(folder, text, "mine", *options)
    expected = saved_tensors(run)

    def moved(name: str) -> float:
        return float((expected[f"{name}/parameter"] - before[name]).abs().max())

    # AdamW's first steps are as long as the rate, whatever the gradient.
    top, first = moved("lm_head.weight"), moved("model.layers.0.self_attn.q_proj.weight")
    assert first == pytest.approx(top / 1000, rel=0.5)
    assert moved("model.embed_tokens.weight") == pytest.approx(top / 10000, rel=0.5)
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    for key, tensor in saved_tensors(run).items():
        assert torch.equal(expected[key], tensor), key
    capsys.readouterr()
    assert main(["train", "--run", "mine", "--resume", "--layer-lr-decay", "0.5"]) == 2
    assert "--layer-lr-decay 0.5 contradicts" in capsys.readouterr().err
    assert main(["train", "--model", "tiny", "--layer-lr-decay", "1.5"]) == 2
    assert "must be above 0 and at most 1" in capsys.readouterr().err
    gradients = ("--average", "gradient", "--target-batch-tokens", "64", "--run", "g")
    assert main([
        "train", "--model", "tiny", "--data", str(text), "--layer-lr-decay", "0.5", *gradients,
        "--precision", "fp32", "--device", "emulated", "--host", "127.0.0.1",
    ]) == 2  # fmt: skip
    assert "one learning rate for all layers" in capsys.readouterr().err


@pytest.mark.usefixtures("assumed_times")
def test_trainer_and_groups_of_ones_own(tmp_path: Path) -> None:
    data = [{key: value[0] for key, value in tokens().items()} for _ in range(8)]
    fields: dict[str, Any] = {"micro_batch": 4, "learning_rate": RATE}

    def trained(folder: str, optimizer: Any = None, **more: Any) -> nn.Module:
        torch.manual_seed(0)
        model = gpt()
        if optimizer is None:
            more["weight_decay"] = 0.1
        arguments = TrainerArguments(output_dir=tmp_path / folder, **fields, **more)
        made = None if optimizer is None else lambda _: optimizer(model)
        with Trainer(
            model, arguments, data, optimizer=made, device="emulated", device_memory="1MiB"
        ) as trainer:
            trainer.train()
        return model

    def own(model: nn.Module) -> torch.optim.Optimizer:
        named = layer_groups(model, decay_groups(model, 0.1), DECAY, RATE)
        return torch.optim.AdamW(named, betas=(0.9, 0.999), fused=True)

    found, expected = trained("a", layer_lr_decay=DECAY), trained("b", own)
    alike = trained("c")
    for key, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(key), parameter), key
    assert not torch.equal(alike.embedding.token.weight, found.embedding.token.weight)
    with pytest.raises(ConfigError, match="layer_lr_decay must be above 0"):
        TrainerArguments(layer_lr_decay=0.0)
