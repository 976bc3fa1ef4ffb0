"""Embeddings by which a query finds its text: swapped as resident, and the loss that is usual."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.models.heads import without_head
from atomtrain.models.hugging_face import build, read_config
from atomtrain.optimizers import AdamW
from atomtrain.training.setup.loading import Weights
from atomtrain.training.setup.objectives import Matching
from tests.support.hugging_face_models import LLAMA, UNTIED, VOCABULARY, write_model
from tests.support.reference import train as resident

pytest.importorskip("transformers")
ROWS, CONTEXT, PADDING = 12, 10, 299


def batch_of(generator: torch.Generator) -> Batch:
    """Return texts of many lengths, padded; labels are the next tokens."""
    ids = torch.full((ROWS, CONTEXT + 1), PADDING)
    labels = torch.full((ROWS, CONTEXT), IGNORED)
    for row, answers in zip(ids, labels, strict=True):
        length = int(torch.randint(1, CONTEXT + 1, (), generator=generator))
        row[:length] = torch.randint(VOCABULARY - 10, (length,), generator=generator)
        answers[:length] = row[1 : length + 1]
    return Batch(ids[:, :-1].contiguous(), labels)


def plain_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy over the cosines of a query with all texts, as sentence-transformers has it."""
    embedded = []
    for row, mask in zip(output.last_hidden_state, batch["attention_mask"], strict=True):
        embedded.append(row[: int(mask.sum())].mean(0))
    cosines = F.cosine_similarity(
        torch.stack(embedded[0::2])[:, None], torch.stack(embedded[1::2])[None], dim=-1
    )
    return F.cross_entropy(20 * cosines, torch.arange(len(cosines)))


def model_in(folder: Path, config: dict[str, Any]) -> Any:
    write_model(folder, config)
    sizes = read_config(folder)
    sizes = dataclasses.replace(sizes, config=without_head(sizes.config))
    model = build(sizes)
    Weights(folder, sizes).fill(model)
    return model


@pytest.mark.usefixtures("assumed_times")
@pytest.mark.parametrize("config", [LLAMA, UNTIED], ids=["tied", "untied"])
def test_swapped_is_resident_and_the_loss_is_the_usual_one(
    config: dict[str, Any], tmp_path: Path
) -> None:
    expected, model = (model_in(tmp_path, config) for _ in range(2))
    assert type(model).__name__ == "LlamaModel"
    generator, objective = torch.Generator().manual_seed(2), Matching()
    steps = [objective.micro_batches(batch_of(generator), 6) for _ in range(3)]
    first = steps[0][0]
    with torch.no_grad():
        output = expected(**first)
        assert float(objective.loss(output, first)) == pytest.approx(
            float(plain_loss(output, first)), abs=1e-5
        )
    optimizer = AdamW(expected.parameters(), lr=1e-2)
    losses = resident(
        expected, steps, optimizer, lambda own, batch: objective.loss(own(**batch), batch)
    )
    assert losses[-1] != losses[0]
    with swap(
        model,
        first,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory="320KiB",
        loss=objective.loss,
        options=Options(micro_batches=2, optimizer_on_device=False),
    ) as engine:
        assert engine.plan.segments > 1
        with objective.listening() as heard:
            assert [engine.step(micro_batches) for micro_batches in steps] == losses
        engine.synchronize()
        for name, parameter in expected.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
    assert len(heard) == 6
    assert 0 <= objective.numbers(heard, [])["accuracy"] <= 1


def test_an_equal_text_of_another_row_is_not_a_wrong_one() -> None:
    hidden = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(24).view(6, 4)
    ids[3], hidden[3] = ids[1], hidden[1]  # the texts of the first two queries
    batch = {"input_ids": ids, "attention_mask": torch.ones(6, 4, dtype=torch.int64)}
    output = type("Output", (), {"last_hidden_state": hidden})
    means = F.normalize(hidden.mean(1), dim=-1)
    scores = 20 * means[0::2] @ means[1::2].T
    own = scores.diagonal()
    wrong = [[2], [2], [0, 1]]
    expected = torch.stack(
        [F.cross_entropy(torch.stack([own[n], *scores[n, wrong[n]]]), torch.tensor(0))
         for n in range(3)]
    ).mean()  # fmt: skip
    assert float(Matching().loss(output, batch)) == pytest.approx(float(expected), abs=1e-5)
