"""Noise on embeddings: swapped is resident bit for bit, and it is transformers' noise."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.data.sampler import Batch
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models.gpt import GPT
from atomtrain.models.neftune import with_noise
from atomtrain.optimizers import AdamW
from atomtrain.training.setup.objective import NextToken
from atomtrain.training.trainer.trainer import Trainer
from atomtrain.training.trainer.trainer_arguments import TrainerArguments
from tests.support.engine_models import gpt, tokens
from tests.support.hugging_face_models import (
    UNTIED,
    saved_tensors,
    train_by_command,
    write_model,
    write_text,
)
from tests.support.reference import gpt_loss
from tests.support.reference import train as resident

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_search_for_a_fit")
ALPHA = 5.0


def hugging_face(folder: Path) -> tuple[Any, Any, Any]:
    """Return a model, three steps of two micro-batches, and the loss."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(290, (3, 4, 13), generator=generator)
    batches = [Batch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    steps = [NextToken().micro_batches(batch, 2) for batch in batches]

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return NextToken().loss(model(batch["input_ids"]), batch)

    return write_model(folder, UNTIED).train(), steps, loss_of


def own(_: Path) -> tuple[Any, Any, Any]:
    return gpt(layers=3, dropout=0.1), [[tokens(), tokens()] for _ in range(3)], gpt_loss


@pytest.mark.usefixtures("assumed_times")
# A weight that two layers share adds what several micro-batches give it in another order.
@pytest.mark.parametrize(
    ("made", "micro_batches"), [(hugging_face, 1), (hugging_face, 2), (own, 1)]
)
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_swapped_noise_is_resident_noise_bit_for_bit(
    made: Any, activations: str, micro_batches: int, tmp_path: Path
) -> None:
    model, steps, loss_of = made(tmp_path)
    steps = [step[:micro_batches] for step in steps]
    quiet, expected = copy.deepcopy(model), with_noise(copy.deepcopy(model), ALPHA)
    optimizers = [AdamW(each.parameters(), lr=1e-2) for each in (quiet, expected)]
    torch.manual_seed(4)
    losses = resident(expected, steps, optimizers[1], loss_of)
    state = torch.get_rng_state()
    torch.manual_seed(4)
    assert resident(quiet, steps, optimizers[0], loss_of) != losses
    torch.manual_seed(4)
    with swap(
        with_noise(model, ALPHA),
        steps[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        device="emulated",
        device_memory="1MiB",
        loss=None if isinstance(model, GPT) else NextToken().loss,
        options=Options(
            micro_batches=micro_batches, segments=3, slots=1, activations=activations,
            optimizer_on_device=False,
        ),
    ) as engine:  # fmt: skip
        assert [engine.step(step) for step in steps] == losses
        assert torch.equal(torch.get_rng_state(), state)
        for name, parameter in expected.named_parameters():
            assert torch.equal(engine.state_dict()[name], parameter), name
        # In evaluation there is none.
        with torch.no_grad():
            found = [float(loss_of(with_noise(expected, 0).eval(), each)) for each in steps[1]]
        assert engine.evaluate(steps[1]) == sum(found) / len(found)
        assert torch.equal(torch.get_rng_state(), state)


def test_the_noise_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.neftune import activate_neftune

    model = write_model(tmp_path, UNTIED).train()
    ours, ids = with_noise(copy.deepcopy(model), ALPHA), torch.arange(24).view(2, 12)
    activate_neftune(model, ALPHA)
    found = []
    for each in (ours, model):
        torch.manual_seed(5)
        found.append(each(ids).logits)
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0], with_noise(ours, 0)(ids).logits, atol=1e-4)


def test_noise_goes_away_as_it_came() -> None:
    model = gpt()
    kind, keys = type(model.embedding.token), list(model.state_dict())
    for alpha in (3.0, 5.0):
        noisy = with_noise(model, alpha).get_input_embeddings()
        assert noisy.neftune_noise_alpha == alpha
        assert isinstance(noisy, nn.Embedding)
        assert list(model.state_dict()) == keys
    assert type(with_noise(model, 0).get_input_embeddings()) is kind
    assert not hasattr(model.embedding.token, "neftune_noise_alpha")
    with pytest.raises(ConfigError, match=r"Linear does not say which that is; give it"):
        with_noise(nn.Linear(2, 2), 5.0)


def test_a_model_of_transformers_without_an_embedding_is_left_alone() -> None:
    import transformers as hf

    config = hf.ResNetConfig(hidden_sizes=[4, 4], depths=[1, 1], embedding_size=4)
    model = hf.ResNetForImageClassification(config)
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()
    assert with_noise(model, 0) is model
    with pytest.raises(ConfigError, match="Classification does not say which that is; give it"):
        with_noise(model, 5.0)


@pytest.mark.usefixtures("assumed_times")
def test_trainer_adds_noise_while_it_is_open(tmp_path: Path) -> None:
    data = [{name: value[0] for name, value in tokens().items()} for _ in range(8)]

    def losses(folder: str, **fields: Any) -> list[float]:
        torch.manual_seed(0)
        model = gpt()
        arguments = TrainerArguments(output_dir=tmp_path / folder, micro_batch=4, **fields)
        with Trainer(model, arguments, data, device="emulated", device_memory="1MiB") as trainer:
            found = trainer.train().losses
        assert type(model.embedding.token) is nn.Embedding
        return list(found)

    noisy = losses("noisy", neftune_noise_alpha=5.0)
    assert noisy == losses("again", neftune_noise_alpha=5.0) != losses("quiet")
    model, arguments = gpt(), TrainerArguments(output_dir=tmp_path, neftune_noise_alpha=5.0)
    with (
        pytest.raises(PlanError),
        Trainer(model, arguments, data, device="emulated", device_memory="1KiB") as trainer,
    ):
        trainer.train()
    assert type(model.embedding.token) is nn.Embedding, "though it never opened"
    with pytest.raises(ConfigError, match="neftune_noise_alpha must be at least 0, not -1"):
        TrainerArguments(neftune_noise_alpha=-1.0)


def test_a_run_resumes_with_the_same_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    train = partial(train_by_command, memory="2MiB", sequences=2, steps=3)
    run = train(folder, text, "mine", "--neftune-noise-alpha", "5", "--checkpoint-every", "1")
    expected = saved_tensors(run)
    quiet = saved_tensors(train(folder, text, "quiet"))
    assert any(not torch.equal(quiet[key], tensor) for key, tensor in expected.items())
    shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    train(folder, text, "mine", "--resume")
    found = saved_tensors(run)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
