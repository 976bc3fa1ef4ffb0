"""Classifiers and reward models: transformers' own logits, swapped as resident, bit for bit."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain import Trainer, TrainerArguments
from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.models.heads import HEAD_WEIGHT, with_head
from atomtrain.models.hugging_face import HuggingFaceConfig, build, read_config
from atomtrain.models.lora import adapted_layers, add_adapters
from atomtrain.models.lora_config import LoraConfig
from atomtrain.optimizers import AdamW
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.objective import Hearing, rows_heard
from atomtrain.training.setup.objectives import Classification, RewardModel
from tests.support.hugging_face_models import UNTIED, VOCABULARY, write_model

pytest.importorskip("transformers")
LABELS = {"classify": ["cat", "dog", "rain"], "reward": None}
OBJECTIVES: dict[str, Any] = {"classify": Classification(), "reward": RewardModel()}
ROWS, CONTEXT, MICRO_BATCH, PADDING = 8, 12, 4, 299
LORA = LoraConfig(r=4, alpha=8.0)


def batch_of(generator: torch.Generator, context: int = CONTEXT) -> Batch:
    """Return texts of many lengths, padded."""
    ids = torch.full((ROWS, context), PADDING)
    for row in ids:
        length = int(torch.randint(1, CONTEXT + 1, (), generator=generator))
        row[:length] = torch.randint(VOCABULARY - 10, (length,), generator=generator)
    labels = torch.randint(3, (ROWS,), generator=generator)
    return Batch(ids, ids, row_labels=labels)


def steps(objective: Any) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    return [objective.micro_batches(batch_of(generator), MICRO_BATCH) for _ in range(3)]


def plain_loss(name: str, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in PyTorch alone: cross-entropy, or Bradley and Terry's as trl has it."""
    if name == "classify":
        return F.cross_entropy(logits, batch["row_labels"])
    chosen, rejected = logits.squeeze(-1)[0::2], logits.squeeze(-1)[1::2]
    return -F.logsigmoid(chosen - rejected).mean()


def sizes_in(folder: Path, name: str) -> HuggingFaceConfig:
    write_model(folder, UNTIED)
    sizes = read_config(folder)
    return dataclasses.replace(sizes, config=with_head(sizes.config, LABELS[name], PADDING))


def model_of(folder: Path, sizes: HuggingFaceConfig, lora: LoraConfig | None) -> Any:
    weights, model = Weights(folder, sizes, seed=5), build(sizes)
    weights.fill(model)
    if lora is not None:
        add_adapters(model, lora)
        with torch.no_grad():
            for name, layer in adapted_layers(model).items():
                read = partial(weights.read, f"{name}.weight")
                for part, values in layer.beginning(read, name):
                    layer.get_parameter(part).copy_(values)
                layer.lora_B.weight.fill_(0.01)
    return model


def of_transformers(sizes: HuggingFaceConfig, state: dict[str, Tensor]) -> Any:
    """Return the model as transformers makes it of the configuration alone."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    make: Any = AutoModelForSequenceClassification.from_config
    model = make(AutoConfig.for_model(**sizes.config), dtype=torch.float32)
    model.load_state_dict(state)
    return model.train()


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("lora", "memory"),
    [(None, "230KiB"), (None, "1MiB"), (LORA, "200KiB")],
    ids=["swapped", "resident", "adapters"],
)
def test_swapped_training_is_resident_training_bit_for_bit(
    name: str, lora: LoraConfig | None, memory: str, tmp_path: Path
) -> None:
    sizes, objective = sizes_in(tmp_path, name), OBJECTIVES[name]
    expected, model = (model_of(tmp_path, sizes, lora) for _ in range(2))
    if lora is None:
        expected = of_transformers(sizes, expected.state_dict())
    else:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert HEAD_WEIGHT in trained
        assert all(".lora_" in name for name in trained if name != HEAD_WEIGHT)
    optimizer = AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for micro_batches in steps(objective):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in micro_batches:
            loss = plain_loss(name, expected(batch["input_ids"]).logits, batch)
            (loss / len(micro_batches)).backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total / len(micro_batches))
    assert losses[-1] != losses[0]
    with swap(
        model,
        steps(objective)[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory=memory,
        loss=objective.loss,
        options=Options(micro_batches=ROWS // MICRO_BATCH),
    ) as engine:
        assert engine.plan.segments > 1 or memory == "1MiB"
        assert [engine.step(micro_batches) for micro_batches in steps(objective)] == losses
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= engine.plan.device_peak_bytes
        with objective.listening() as heard:
            engine.evaluate(micro_batches)
        engine.synchronize()
        for each, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(each), parameter), each
    with torch.no_grad():
        logits = torch.cat([expected.eval()(b["input_ids"]).logits for b in micro_batches])
    numbers = objective.numbers(heard, micro_batches)
    if name == "classify":
        classes = torch.cat([batch["row_labels"] for batch in micro_batches])
        assert numbers == {"accuracy": float((logits.argmax(1) == classes).float().mean())}
    else:
        margins = logits[0::2, 0] - logits[1::2, 0]
        torch.testing.assert_close(rows_heard(heard), logits[:, 0])
        assert numbers["reward_margin"] == pytest.approx(float(margins.mean()), abs=1e-6)
        assert numbers["reward_accuracy"] == float((margins > 0).float().mean())


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_trainer_takes_models_of_transformers(name: str, tmp_path: Path) -> None:
    """As docs/python.md says: a classifier has its own loss, a reward model's is given."""
    sizes = sizes_in(tmp_path, name)
    state = model_of(tmp_path, sizes, None).state_dict()
    expected, model = (of_transformers(sizes, state) for _ in range(2))
    model.config.use_cache = False
    whole = batch_of(torch.Generator().manual_seed(2))
    assert whole.row_labels is not None
    if name == "classify":
        pairs = zip(whole.inputs, whole.row_labels, strict=True)
        data = [{"input_ids": ids, "labels": label} for ids, label in pairs]
    else:
        data = [{"input_ids": both} for both in whole.inputs.view(ROWS // 2, 2, CONTEXT)]
    taken: list[dict[str, Tensor]] = []

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        joined = torch.stack if name == "classify" else torch.cat
        batch = {key: joined([sample[key] for sample in samples]) for key in samples[0]}
        taken.append(batch)
        return batch

    arguments = TrainerArguments(
        output_dir=tmp_path / "run", micro_batch=len(data) // 2, epochs=1, schedule="constant",
        learning_rate=1e-2, final_factor=1.0, clip_norm=None,
    )  # fmt: skip
    with Trainer(
        model,
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        loss=None
        if name == "classify"
        else lambda output, _: -F.logsigmoid(output.logits[::2] - output.logits[1::2]).mean(),
        device="emulated",
        device_memory="230KiB",
    ) as trainer:
        losses = trainer.train().losses
        assert trainer.engine.plan.segments > 1
        found = trainer.engine.state_dict()
    optimizer = AdamW(expected.parameters(), lr=1e-2)
    for batch, loss in zip(taken[1:], losses, strict=True):  # the first one is the example
        optimizer.zero_grad(set_to_none=True)
        row_labels = batch.get("labels", torch.empty(0))
        mine = plain_loss(name, expected(batch["input_ids"]).logits, {"row_labels": row_labels})
        assert float(mine.detach()) == loss
        mine.backward()
        optimizer.step()
    for each, parameter in expected.named_parameters():
        assert torch.equal(found[each], parameter), each


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_those_of_the_formula(name: str) -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    generator = torch.Generator().manual_seed(0)
    objective: Hearing = OBJECTIVES[name]
    [batch] = OBJECTIVES[name].micro_batches(batch_of(generator), ROWS)
    shape = (ROWS, 3 if name == "classify" else 1)
    logits = (9 * torch.randn(shape, generator=generator)).requires_grad_()
    found = OBJECTIVES[name].loss(Output(logits), batch)
    if name == "classify":
        wide = logits.double().softmax(1).gather(1, batch["row_labels"][:, None])
        expected = -wide.log().mean()
    else:
        wide = logits.double()
        expected = torch.log(1 + torch.exp(wide[1::2] - wide[0::2])).mean()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits)
    )
    assert objective._heard is None


def test_padding_does_not_change_what_is_said(tmp_path: Path) -> None:
    sizes = sizes_in(tmp_path, "classify")
    model = model_of(tmp_path, sizes, None).eval()
    short = batch_of(torch.Generator().manual_seed(3)).inputs
    long = F.pad(short, (0, 20), value=PADDING)
    alone = []
    with torch.no_grad():
        for row in short:
            alone.append(model(row[row != PADDING][None]).logits)
        masked = model(long, attention_mask=(long != PADDING).long()).logits
        for ids in (short, long):
            torch.testing.assert_close(model(ids).logits, torch.cat(alone))
    torch.testing.assert_close(masked, torch.cat(alone))
    assert len({round(float(row[0, 0]), 6) for row in alone}) == ROWS, "texts are told apart"


def test_a_new_head_begins_by_the_seed_and_an_old_one_as_it_was(tmp_path: Path) -> None:
    sizes = sizes_in(tmp_path, "classify")
    one, again, other = (Weights(tmp_path, sizes, seed).read(HEAD_WEIGHT) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(0.02, rel=0.3)
    model_of(tmp_path, sizes, None)
    trained = of_transformers(sizes, {**model_of(tmp_path, sizes, None).state_dict()})
    trained.save_pretrained(tmp_path / "trained")
    known = read_config(tmp_path / "trained")
    assert known.labels == LABELS["classify"]
    kept = Weights(tmp_path / "trained", known, seed=9).read(HEAD_WEIGHT)
    assert torch.equal(kept, trained.score.weight)
