"""Documents that share a sequence: none sees another, and swapped training is resident training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.data.sampler import Batch, divided_at, joined
from atomtrain.models.gpt import own_past, places
from atomtrain.training.setup.objective import IGNORED, NextToken, OwnLoss
from tests.support.reference import train, twin
from tests.support.swapped import adamw, check, gpt, random_delays

pytestmark = pytest.mark.usefixtures("assumed_times")
LENGTHS = ((5, 1, 8, 3), (9, 8), (17,))
WIDTH = 17
CLOSE = 2e-6
"""Kernels add in another order with a mask than without; logits are about 1 here."""


def documents_of(lengths: Sequence[Sequence[int]] = LENGTHS) -> Tensor:
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows)


def packed_batch(vocabulary: int = 101) -> Batch:
    tokens = torch.randint(vocabulary, (len(LENGTHS), WIDTH + 1))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents=documents_of())


def pieces(batch: Batch) -> list[tuple[int, slice]]:
    """Return the row and the range of each document."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            found.append((row, slice(start, start + length)))
            start += length
    return found


def check_alone(model: nn.Module, objective: Any) -> None:
    """Compare the logits of packed documents with those of each alone."""
    model.eval()
    batch = packed_batch()
    with torch.no_grad():
        together = model(**objective.inputs(batch)).logits
        for row, part in pieces(batch):
            alone = model(input_ids=batch.inputs[row : row + 1, part]).logits[0]
            assert torch.allclose(together[row, part], alone, rtol=0, atol=CLOSE)
        mixed = model(**objective.inputs(batch._replace(documents=None))).logits
    assert not torch.allclose(together[0], mixed[0], rtol=0, atol=1e-3)
    assert torch.allclose(together[2], mixed[2], rtol=0, atol=CLOSE)


def test_places_begin_again_and_nobody_sees_another_document() -> None:
    documents = torch.tensor([[3, 3, 1, 1, 1, 7], [0, 0, 0, 0, 0, 0]])
    assert places(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    seen = own_past(documents)
    assert seen.shape == (2, 1, 6, 6)
    assert seen[0, 0].sum(-1).tolist() == [1, 2, 1, 2, 3, 1]
    assert torch.equal(seen[1, 0], torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_separator_begins_the_next_document() -> None:
    inputs = torch.tensor([[4, 5, 0, 6, 0, 0, 7]])
    batch = divided_at(Batch(inputs, inputs), separator=0)
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 1, 1, 2, 3, 3]]
    twice = joined([batch, batch])
    assert twice.documents is not None
    assert twice.documents.shape == twice.inputs.shape == (2, 7)
    assert joined([Batch(inputs, inputs)]).documents is None


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_computes_each_document_alone(tied: bool) -> None:
    check_alone(gpt(tied=tied), OwnLoss())


def gpt_steps(micro_batches: int) -> list[list[dict[str, Tensor]]]:
    def one() -> dict[str, Tensor]:
        return OwnLoss().micro_batches(packed_batch(), len(LENGTHS))[0]

    return [[one() for _ in range(micro_batches)] for _ in range(2)]


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("options", [{}, {"activations": "keep"}, {"activations": "offload"}])
def test_gpt_swapped_is_resident(segments: int, options: dict[str, Any]) -> None:
    check(gpt(0.2, tied=False), gpt_steps(2), segments=segments, inject=random_delays(1), **options)


@pytest.mark.parametrize("options", [{"host_layers": 1}, {"head_pieces": None, "host_layers": 0}])
def test_gpt_with_its_embedding_here_or_there(options: dict[str, Any]) -> None:
    check(gpt(0.0, tied=True), gpt_steps(1), segments=2, **options)


def test_evaluation_and_an_outer_loss() -> None:
    model, steps = gpt(tied=False), gpt_steps(1)

    def loss(output: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten())

    example = {**steps[0][0], "targets": steps[0][0]["labels"]}
    del example["labels"]
    with torch.no_grad():
        expected = float(twin(model).eval()(**steps[0][0]).loss)
    with atomtrain.swap(
        model, example, optimizer=adamw, device="emulated:1GiB/s", device_memory="64MiB", loss=loss
    ) as engine:
        assert engine.evaluate([example]) == expected


SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


def hugging_face(name: str, attention: str = "sdpa") -> nn.Module:
    hf = pytest.importorskip("transformers")
    small = {**SMALL, "attn_implementation": attention}
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
        )  # fmt: skip
        return hf.GPT2LMHeadModel(config)
    if name == "mistral":  # whose window is shorter than the longest document
        return hf.MistralForCausalLM(hf.MistralConfig(**small, sliding_window=4))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**small, head_dim=8))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**small))


ATTENTION = ["sdpa", "eager"]
"""What models compute attention with on the devices that we know: the fused kernel, and for models
that have none the plain products."""
NAMES = ["llama", "qwen3", "gpt2", "mistral"]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_models_compute_each_document_alone(name: str, attention: str) -> None:
    model = hugging_face(name, attention)
    assert model.config._attn_implementation == attention
    check_alone(model, NextToken())


def only(batch: Batch, row: int, part: slice) -> Batch:
    """Return the batch with other tokens in all other documents, and targets of this one alone."""
    inputs, labels = torch.randint(101, batch.inputs.shape), torch.full_like(batch.labels, IGNORED)
    inputs[row, part], labels[row, part] = batch.inputs[row, part], batch.labels[row, part]
    return batch._replace(inputs=inputs, labels=labels)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_no_token_reaches_the_loss_of_another_document(name: str, attention: str) -> None:
    """Not by a bit, forward or backward, and neither when the model is taken apart and swapped."""
    model, objective, batch = hugging_face(name, attention), NextToken(), packed_batch()
    embedding, reached = model.get_input_embeddings(), list[Tensor]()

    def keep(*arguments: Any) -> None:
        arguments[-1].retain_grad()
        reached.append(arguments[-1])

    handle = embedding.register_forward_hook(keep)
    mine = pieces(batch)[1:3]  # the second and the third of the first row
    for row, part in mine:
        losses = []
        for _ in range(2):
            (micro_batch,) = objective.micro_batches(only(batch, row, part), len(LENGTHS))
            output = model(**{k: micro_batch[k] for k in ("input_ids", "position_ids")})
            loss = objective.loss(output, micro_batch)
            losses.append(float(loss.detach()))
            loss.backward()
            gradient = reached.pop().grad
            own = gradient[row, part].clone()
            gradient[row, part] = 0.0
            assert own.count_nonzero() > 0
            assert gradient.count_nonzero() == 0
        assert losses[0] == losses[1]
    handle.remove()
    example = objective.micro_batches(batch, len(LENGTHS))[0]
    with atomtrain.swap(
        model, example, optimizer=adamw, device="emulated:1GiB/s", device_memory="64MiB",
        loss=objective.loss, options=atomtrain.Options(segments=2, optimizer_on_device=False),
    ) as engine:  # fmt: skip
        for row, part in mine:
            again = [
                objective.micro_batches(only(batch, row, part), len(LENGTHS)) for _ in range(2)
            ]
            assert engine.evaluate(again[0]) == engine.evaluate(again[1])


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_models_swapped_are_resident(name: str, attention: str) -> None:
    model, objective = hugging_face(name, attention), NextToken()
    steps = [objective.micro_batches(packed_batch(), len(LENGTHS)) for _ in range(2)]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        return objective.loss(output, batch)

    reference = twin(model)
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, loss_of)
    with atomtrain.swap(
        model, steps[0][0], optimizer=adamw, device="emulated:1GiB/s", device_memory="64MiB",
        loss=objective.loss,
        options=atomtrain.Options(segments=2, optimizer_on_device=False),
    ) as engine:  # fmt: skip
        assert [engine.step(step) for step in steps] == expected
        weights = engine.state_dict()
        for key, value in reference.state_dict().items():
            assert torch.equal(weights[key], value), key
