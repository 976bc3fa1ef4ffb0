"""Thirty steps by the real command, and by `transformers.Trainer` and `peft` on the same rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from atombench.engine.curve import CurveSetup, losses_of
from atombench.engine.curve import losses_of_trainer as losses_of_model
from atomtrain.cli.main import main
from tests.support.hugging_face_models import UNTIED, write_model, write_text

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")
STEPS, SEQUENCES, CONTEXT, RATE = 30, 4, 16, 3e-3


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"), UNTIED)
    write_text(Path("text.txt"))


def train(run: str, *more: str, steps: int = STEPS, rate: float = RATE) -> Path:
    """Train by `atom train`; return the peer's folder."""
    arguments = [
        "train", "--model", "model", "--data", "text.txt", "--run", run, "--host", "127.0.0.1",
        "--device", "emulated:4GiB/s", "--device-memory", "2MiB", "--context", str(CONTEXT),
        "--sequences", str(SEQUENCES), "--micro-batch", str(SEQUENCES), "--steps", str(steps),
        "--plain", "--no-profile", "--threads", "1", "--evaluate-every", "1000",
        "--checkpoint-every", "1000", "--precision", "fp32", "--learning-rate", str(rate),
        "--schedule", "constant", "--warmup-steps", "0", "--weight-decay", "0",
    ]  # fmt: skip
    assert main([*arguments, *more]) == 0
    return Path("runs") / run / "peer-0"


def losses_of_trainer(model: Any, peer: Path) -> list[float]:
    setup = CurveSetup("2MiB", CONTEXT, SEQUENCES, STEPS, data="text.txt")
    return losses_of_model(model, peer, setup, RATE, Path("trainer"))


def check(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
    assert found[-1] < found[0] - 0.1, "it learnt"


def test_all_weights() -> None:
    peer = train("full")
    model = hf.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    check(losses_of(peer), losses_of_trainer(model, peer))


def test_adapters() -> None:
    """`peft` begins with the run's adapters: those of a run that has hardly learnt."""
    peft = pytest.importorskip("peft")
    lora = ("--lora", "r=4,alpha=32")
    peer = train("adapted", *lora)
    begun = train("begun", *lora, steps=1, rate=1e-30)
    assert main(["export", str(begun), "adapters"]) == 0
    base = hf.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    before = copy.deepcopy(base.state_dict())
    model = peft.PeftModel.from_pretrained(base, "adapters", is_trainable=True)
    check(losses_of(peer), losses_of_trainer(model, peer))
    for name, tensor in before.items():
        stem, _, part = name.rpartition(".")
        wrapped = f"base_model.model.{stem}.base_layer.{part}"
        kept = model.state_dict()
        assert torch.equal(kept.get(wrapped, kept.get(f"base_model.model.{name}")), tensor)
