"""Thirty steps by the real command, and by `transformers.Trainer` and `peft` on the same rows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atombench.engine.curve import CurveSetup, losses_of, losses_on
from atombench.engine.curve import losses_of_trainer as losses_of_model
from atomtrain.checkpoint import open_checkpoint
from atomtrain.cli.main import main
from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import SamplerConfig
from atomtrain.events import EVENTS_FILE, read_events
from atomtrain.training.setup.state import recipe_of
from atomtrain.training.setup.texts import read_text
from tests.support.hugging_face_models import SENTENCE, UNTIED, write_model, write_text

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")
STEPS, SEQUENCES, CONTEXT, RATE = 30, 4, 16, 3e-3


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"), UNTIED)
    write_text(Path("text.txt"))


def train(
    run: str, *more: str, steps: int = STEPS, rate: float = RATE, data: str = "text.txt"
) -> Path:
    """Train by `atom train`; return the peer's folder."""
    arguments = [
        "train", "--model", "model", "--data", data, "--run", run, "--host", "127.0.0.1",
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


def test_losses_of_routers_count_as_in_transformers() -> None:
    mixture = {
        **UNTIED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.5,
    }  # fmt: skip
    write_model(Path("model"), mixture)
    peer = train("routed", steps=1)
    model = hf.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    batch = sampler_of(peer, "text.txt").batch(0)
    with torch.no_grad():
        # The numbers behind their own places, which transformers would move by one.
        told = model(batch.inputs, labels=batch.labels, shift_labels=batch.labels)
        text = model(batch.inputs, labels=batch.labels, shift_labels=batch.labels,
                     output_router_logits=False)  # fmt: skip
    assert losses_of(peer) == pytest.approx([float(told.loss)], abs=1e-5)
    assert float(told.loss - text.loss) == pytest.approx(0.5 * float(told.aux_loss), abs=1e-5)
    assert float(told.aux_loss) > 1
    told_of = [e["loss"] for e in read_events(peer / EVENTS_FILE) if e["event"] == "evaluation"]
    assert told_of, "held-out text was tried"
    assert max(told_of) < float(text.loss) + 0.1, "its loss is of the text alone"


def sampler_of(peer: Path, data: str) -> Any:
    recipe, tokenizer = recipe_of(open_checkpoint(peer))
    config = SamplerConfig(context_tokens=CONTEXT, sequences=SEQUENCES, seed=recipe.seed)
    return read_text((data,), recipe.sizes, tokenizer).material.sampler(config, peer.name)


def write_answers(file: Path) -> None:
    """Write rows whose answers have one word to ten."""
    words = SENTENCE.split()
    rows = []
    for number in range(80):
        count = (1, 10, 2, 7, 1, 4)[number % 6]
        answer = " ".join(words[(number + place) % len(words)] for place in range(count))
        rows.append(json.dumps({"prompt": f"{words[number % 5]} ", "completion": answer}))
    file.write_text("\n".join(rows))


def rows_of(peer: Path, data: str) -> list[dict[str, Tensor]]:
    """Return the rows of a run's steps, in their order, as transformers wants them."""
    drawn, rows = sampler_of(peer, data), []
    for step in range(STEPS):
        batch = drawn.batch(step)
        last = batch.labels[:, -1:].clamp(min=0)
        ids, none = torch.cat([batch.inputs, last], 1), torch.full_like(last, IGNORED)
        labels = torch.cat([none, batch.labels], 1)
        rows += [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
    return rows


def test_answers_of_unlike_length_in_several_micro_batches() -> None:
    write_answers(Path("answers.jsonl"))
    peer = train("answers", "--micro-batch", "1", data="answers.jsonl")
    rows = rows_of(peer, "answers.jsonl")
    steps = [rows[first : first + SEQUENCES] for first in range(0, len(rows), SEQUENCES)]
    assert any(len({int((r["labels"] != IGNORED).sum()) for r in step}) > 2 for step in steps)
    model = hf.AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    check(losses_of(peer), losses_on(rows, model, 1, RATE, Path("trainer"), SEQUENCES))
