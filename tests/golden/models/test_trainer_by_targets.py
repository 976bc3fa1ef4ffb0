"""`Trainer` on rows of unlike length, in several micro-batches a step: `transformers.Trainer`'s
losses and weights, all of a model and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atombench.engine.curve import losses_on
from atomtrain import TrainerArguments
from atomtrain.checkpoint import save
from atomtrain.data.examples import IGNORED
from atomtrain.training.trainer import trainer as module
from atomtrain.training.trainer.targets import first_target, targets_in
from tests.support.hugging_face_models import UNTIED

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs it")
pytestmark = pytest.mark.usefixtures("assumed_times")
STEPS, MICRO_BATCH, MICRO_BATCHES, CONTEXT, RATE = 10, 2, 3, 24, 3e-3
NONE, PADDING = -100, 0


class Rows:
    """Prompts with answers of one token to twenty, padded; notes who is asked for."""

    def __init__(self, count: int = STEPS * MICRO_BATCH * MICRO_BATCHES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows, self.asked = [], list[int]()
        for number in range(count):
            ids = torch.randint(2, 40, (CONTEXT,), generator=generator)
            labels = ids.clone()
            end = 3 + (1, 20, 2, 9, 1, 1, 14)[number % 7]
            ids[end:], labels[end:], labels[:3] = PADDING, NONE, NONE
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return self.rows[index]


def model() -> Any:
    torch.manual_seed(3)
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(**UNTIED))


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model(), config)


def trainer(
    learner: nn.Module, folder: Path, rows: Rows, device: str = "emulated", **more: Any
) -> atomtrain.Trainer:
    settings = {
        "micro_batch": MICRO_BATCH, "micro_batches": MICRO_BATCHES, "learning_rate": RATE,
        "schedule": "constant", "final_factor": 1.0, "betas": (0.9, 0.95), "output_dir": folder,
    }  # fmt: skip
    arguments = TrainerArguments(**{**settings, **more.pop("settings", {})})
    return atomtrain.Trainer(learner, arguments, rows, device=device, device_memory="1MiB", **more)


def losses(learner: nn.Module, folder: Path, rows: Rows, **more: Any) -> list[float]:
    """Train; leave in `rows` those that steps took, in their order."""
    with trainer(learner, folder, rows, **more) as made:
        made.engine  # noqa: B018  it takes an example
        rows.asked.clear()
        return list(made.train().losses)


def same(found: list[float], expected: list[float]) -> bool:
    assert len(found) == len(expected) == STEPS
    return torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [model, adapted])
def test_losses_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    rows, learner, theirs = Rows(), make(), make()
    found = losses(learner, tmp_path / "ours", rows)
    in_order = [rows.rows[index] for index in rows.asked]
    expected = losses_on(in_order, theirs, MICRO_BATCH, RATE, tmp_path / "theirs", MICRO_BATCHES)
    assert same(found, expected)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(learner.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)

    def alike(output: Any, _: Any) -> Tensor:
        loss: Tensor = output.loss
        return loss

    assert not same(losses(make(), tmp_path / "alike", Rows(), loss=alike), expected)


def test_an_evaluation_is_that_of_transformers(tmp_path: Path) -> None:
    """Which weights by targets only within a batch; a batch without any has no loss."""
    rows, learner = Rows(12), model()
    rows.rows[0]["labels"][:] = rows.rows[1]["labels"][:] = IGNORED
    arguments = hf.TrainingArguments(
        str(tmp_path / "theirs"), per_device_eval_batch_size=MICRO_BATCH, report_to=[], use_cpu=True
    )
    theirs = hf.Trainer(learner, arguments, eval_dataset=rows.rows).evaluate()["eval_loss"]
    with trainer(learner, tmp_path, rows) as made:
        assert made.evaluate(rows)["eval_loss"] == pytest.approx(theirs, abs=1e-5)


def test_several_devices_share_one_count(tmp_path: Path) -> None:
    found = losses(model(), tmp_path / "one", Rows())
    with trainer(model(), tmp_path / "two", Rows(), device="emulated,emulated") as made:
        assert same(list(made.train().losses), found)
        assert len(made.engine.devices) == 2


def test_a_training_from_before_goes_on_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints say nothing of targets: micro-batches count alike to the end."""

    def before(folder: Path, step: int, shards: Any, meta: dict[str, Any]) -> Path:
        return save(folder, step, shards, {k: v for k, v in meta.items() if k != "by_targets"})

    half = {"max_steps": STEPS // 2}
    with monkeypatch.context() as patched:
        patched.setattr(module, "first_target", lambda _: None)
        alike = losses(model(), tmp_path / "alike", Rows())
        patched.setattr(module, "save", before)
        losses(model(), tmp_path / "old", Rows(), settings=half)
    with trainer(model(), tmp_path / "old", Rows()) as made:
        assert list(made.train(resume_from_checkpoint=True).losses) == alike
    by_targets = losses(model(), tmp_path / "new", Rows())
    losses(model(), tmp_path / "again", Rows(), settings=half)
    with trainer(model(), tmp_path / "again", Rows()) as made:
        assert list(made.train(resume_from_checkpoint=True).losses) == by_targets
    assert not same(alike, by_targets)


def small(kind: str, model_type: str, **more: Any) -> Any:
    sizes = {**UNTIED, "model_type": model_type, "pad_token_id": 0, **more}
    return getattr(hf, kind).from_config(hf.AutoConfig.for_model(**sizes))


def test_whose_loss_is_a_mean_over_targets() -> None:
    t5 = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    assert first_target(model()) == first_target(adapted()) == 1
    assert first_target(small("AutoModelForTokenClassification", "llama")) == 0
    assert first_target(small("AutoModelForSeq2SeqLM", "t5", **t5)) == 0
    assert first_target(small("AutoModelForSequenceClassification", "llama")) is None
    assert first_target(nn.Linear(2, 2)) is None
    refuses = model()
    refuses.accepts_loss_kwargs = False
    assert first_target(refuses) is None


def test_targets_are_counted_behind_the_first_place() -> None:
    labels = torch.tensor([[NONE, 4, 5], [6, NONE, 7]])
    batches = [{"labels": labels}, {"labels": torch.full((2, 3), NONE)}]
    assert targets_in(batches, 1) == [3, 0]
    assert targets_in(batches, 0) == [4, 0]
    assert targets_in(batches, None) is None
    assert targets_in(batches[1:], 1) is None, "none has any"
    assert targets_in([{"input_ids": labels}], 1) is None
    assert targets_in([labels], 1) is None
