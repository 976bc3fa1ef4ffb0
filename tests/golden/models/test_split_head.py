"""A head in pieces: swapped training equals resident training with the same pieces bit for bit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis.head.pieces import linear_cross_entropy
from atomtrain.models import GPT, GPTConfig
from tests.support.engine_models import swap
from tests.support.reference import HeadFirst, assert_equal_training, gpt_loss, train, twin

STEPS = 3
CONFIG = GPTConfig(layers=2, width=30, heads=3, head_width=7, vocabulary=101, context=19)

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4321)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def gpt(pieces: int, tied: bool = True) -> GPT:
    model = GPT(dataclasses.replace(CONFIG, head_pieces=pieces))
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(CONFIG.vocabulary, CONFIG.width) * 0.02)
    return model


def token_steps(micro_batches: int) -> list[list[dict[str, Tensor]]]:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(CONFIG.vocabulary, (3, 18))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return [[batch() for _ in range(micro_batches)] for _ in range(STEPS)]


def check(
    model: nn.Module, reference: nn.Module, steps: list[list[dict[str, Tensor]]], **options: Any
) -> None:
    """Swap the model; train the reference as it is; compare every bit."""
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, gpt_loss)
    options.setdefault("micro_batches", len(steps[0]))
    with swap(model, steps[0][0], optimizer=adamw, **options) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        trained = reference.model if isinstance(reference, _InPieces) else reference
        assert_equal_training(engine, trained, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("pieces", [4, 7])
def test_tied_gpt_with_one_micro_batch(pieces: int, segments: int) -> None:
    model = gpt(pieces)
    check(model, twin(model), token_steps(1), segments=segments)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_untied_gpt(micro_batches: int, segments: int) -> None:
    model = gpt(4, tied=False)
    check(model, twin(model), token_steps(micro_batches), segments=segments)


def test_tied_gpt_with_three_micro_batches_adds_the_heads_gradients_first() -> None:
    model, steps = gpt(4), token_steps(3)
    head_first = HeadFirst(twin(model))
    resident = adamw([p for p in head_first.parameters() if p is not head_first.alias])
    expected = [head_first.step(micro_batches, resident) for micro_batches in steps]
    with swap(model, steps[0][0], optimizer=adamw, micro_batches=3, segments=3) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        state = engine.state_dict()
        for name, tensor in head_first.gpt.state_dict().items():
            assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_option_is_the_models_own_choice(micro_batches: int) -> None:
    """A model without pieces, swapped with 4, is a resident model with 4; and the other way."""
    steps = token_steps(micro_batches)
    for own, asked in ((1, 4), (4, 1), (2, 5)):
        model = gpt(own, tied=False)
        reference = gpt(asked, tied=False)
        reference.load_state_dict(model.state_dict())
        check(model, reference, steps, head_pieces=asked, segments=2)
        assert model.head.pieces == own, "the caller's model is left as it is"


def test_one_piece_and_none_keep_the_bits() -> None:
    steps = token_steps(1)
    for pieces in (1, None):
        model = gpt(1)
        check(model, twin(model), steps, head_pieces=pieces)


def test_auto_is_a_resident_head_in_as_many_pieces() -> None:
    wide = dataclasses.replace(CONFIG, vocabulary=4096)
    model, steps = GPT(wide), token_steps(1)
    with swap(twin(model), steps[0][0], optimizer=adamw, head_pieces="auto") as engine:
        pieces = engine.planner.chain.layers[-1].module.pieces
        assert pieces > 1
        losses = [engine.step(micro_batches) for micro_batches in steps]
    reference = GPT(dataclasses.replace(wide, head_pieces=pieces))
    reference.load_state_dict(model.state_dict())
    assert train(reference, steps, adamw(reference.parameters()), gpt_loss) == losses


def test_evaluation_computes_the_same_loss() -> None:
    model, [[batch], *_] = gpt(4), token_steps(1)
    with torch.no_grad():
        expected = float(model.eval()(**batch).loss)
    with swap(model, batch, optimizer=adamw) as engine:
        assert engine.evaluate([batch]) == expected


class _InPieces(nn.Module):
    """A Hugging Face causal language model whose loss is written out, in pieces."""

    def __init__(self, model: nn.Module, pieces: int) -> None:
        super().__init__()
        self.model, self.pieces = model, pieces

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        hidden = self.model.base_model(input_ids=input_ids).last_hidden_state
        following = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = linear_cross_entropy(
            hidden.flatten(0, 1), self.model.lm_head.weight, None, following.flatten(),
            pieces=self.pieces,
        )  # fmt: skip
        return SimpleNamespace(loss=loss)


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, use_cache=False,
            tie_word_embeddings=name == "tied llama",
        )
    )  # fmt: skip


# Several micro-batches add a tied weight's gradients in another order, see `HeadFirst`.
@pytest.mark.parametrize(
    ("name", "micro_batches"), [("llama", 1), ("llama", 3), ("tied llama", 1), ("gpt2", 1)]
)
def test_a_hugging_face_model(name: str, micro_batches: int) -> None:
    model = hugging_face(name).train()
    reference = _InPieces(twin(model), 4)
    check(model, reference, token_steps(micro_batches), segments=2, head_pieces=4)


def test_a_hugging_face_model_is_evaluated_in_pieces_too() -> None:
    model, [[batch], *_] = hugging_face("llama").train(), token_steps(1)
    with torch.no_grad():
        expected = float(_InPieces(twin(model).eval(), 4)(**batch).loss)
    with swap(model, batch, optimizer=adamw, head_pieces=4) as engine:
        assert engine.evaluate([batch]) == expected
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


def outer_loss(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_loss_of_the_callers(micro_batches: int) -> None:
    """The head of an `nn.Sequential`, and cross-entropy in a Python function after it."""

    class Reference(nn.Module):
        def __init__(self, model: nn.Sequential) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            hidden = self.model[:-1](ids).flatten(0, 1)
            last = self.model[-1]
            return linear_cross_entropy(hidden, last.weight, last.bias, labels.flatten(), pieces=3)

    model = nn.Sequential(nn.Embedding(71, 24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 71))
    steps = [
        [(torch.randint(71, (2, 9)), torch.randint(71, (2, 9))) for _ in range(micro_batches)]
        for _ in range(STEPS)
    ]
    reference = Reference(twin(model))
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, lambda model, batch: model(*batch))
    options = {"micro_batches": micro_batches, "segments": 2, "head_pieces": 3}
    with swap(model, steps[0][0], optimizer=adamw, loss=outer_loss, **options) as engine:
        assert [engine.step(batches) for batches in steps] == expected
        assert_equal_training(engine, reference.model, resident)
