"""A chain that computes other bits than its model is refused when it is opened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atomtrain.analysis import chain_of
from atomtrain.analysis.layers.checking import check_chain
from atomtrain.cli.main import main
from atomtrain.errors import AnalysisError, ConfigError
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup import model_check
from tests.support import any_models
from tests.support.engine_models import square, swap
from tests.support.hugging_face_models import write_model, write_text

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.linspace(-1, 1, 8).view(2, 4)


class OtherWhenExported(nn.Module):
    """Cannot be traced unawares, and computes something else when it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if torch.compiler.is_exporting():
            return self.second(self.other(hidden))
        if hidden.sum() > 1e9:  # what runs depends on data
            return hidden
        return self.second(hidden)

    def other(self, hidden: Tensor) -> Tensor:
        return hidden + 1e-6


class OtherBackwardWhenExported(OtherWhenExported):
    def other(self, hidden: Tensor) -> Tensor:
        return hidden.detach() + 0 * hidden  # the same value, and no gradient for what is before


class NeverTheSame(OtherWhenExported):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            NeverTheSame.calls += 1
            x = x * (1 + NeverTheSame.calls / 16)
        return super().forward(x)


def opened(model: nn.Module, check_model: bool = True) -> None:
    with swap(model, X, loss=square, check_model=check_model) as engine:
        engine.step([X])


def test_another_loss_is_refused_unless_nobody_asks() -> None:
    with pytest.raises(AnalysisError, match=r"OtherWhenExported do not .* report .*never"):
        opened(OtherWhenExported())
    opened(OtherWhenExported(), check_model=False)


def test_another_gradient_is_refused_by_its_name() -> None:
    with pytest.raises(AnalysisError, match=r"gradient of 'first\.weight' \(by up to .*; 2 of 4"):
        opened(OtherBackwardWhenExported())


def test_a_frozen_parameter_is_not_compared() -> None:
    model = OtherBackwardWhenExported()
    model.first.requires_grad_(False)
    opened(model)


def test_a_model_that_does_not_repeat_itself_is_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "atomtrain.analysis"):
        opened(NeverTheSame())
    assert "other bits each time" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    "make",
    [any_models.gpt2_with_dropout, any_models.resnet, any_models.u_net],
    ids=lambda make: make.__name__,
)
def test_a_right_chain_passes_and_everything_stays_as_it_was(make: Any) -> None:
    model, draw = make()
    example = draw()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = chain_of(model, example)
    state = torch.get_rng_state()
    check_chain(model, traced, example)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def train(folder: Path, text: Path, *more: str) -> int:
    return main(
        [
            "train", "--model", str(folder), "--data", str(text), "--host", "127.0.0.1",
            "--device", "emulated:4GiB/s", "--context", "16", "--sequences", "2", "--steps", "1",
            "--plain", "--no-profile", "--threads", "1", *more,
        ]
    )  # fmt: skip


@pytest.fixture
def _seen_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LLaMA compute something else on tensors without data, as libraries sometimes do."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return original(self, x * (1 + 1e-6) if isinstance(x, FakeTensor) else x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)


@pytest.mark.usefixtures("_seen_through")
def test_the_command_refuses_a_model_that_is_traced_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / "model", write_text(tmp_path / "text.txt")
    write_model(folder)
    assert train(folder, text) != 0
    wrong = "layers found in LlamaForCausalLM do not compute what it computes itself"
    assert wrong in capsys.readouterr().err
    assert train(folder, text, "--check-model", "never") == 0
    monkeypatch.setattr(model_check, "MOST_BYTES", 1)
    assert train(folder, text) == 0
    assert train(folder, text, "--check-model", "always") != 0


def test_a_long_check_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with swap(OtherWhenExported(), X, loss=square) as engine:
        assert model_check._too_much(engine) == ""
        monkeypatch.setattr(model_check, "MOST_S", 0.0)
        assert "more than 0 s" in model_check._too_much(engine)


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="--check-model 'yes' does not exist; choose auto"):
        TrainOptions(check_model="yes")
