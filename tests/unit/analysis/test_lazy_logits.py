"""Losses that are Python functions: they get logits that are never computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.head.head import split_head
from atomtrain.analysis.head.lazy_logits import LazyLogits
from atomtrain.errors import AnalysisError
from tests.support.engine_models import gpt, tokens

B, T, WIDTH, VOCABULARY = 2, 5, 8, 29
Loss = Callable[[Any, Tensor], Tensor]


def draw(bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return hidden `[B, T, D]`, weight, bias and labels `[B, T]`."""
    torch.manual_seed(0)
    labels = torch.randint(VOCABULARY, (B, T))
    labels[0, 1] = -100
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(B, T, WIDTH, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randn(VOCABULARY).double() if bias else None, labels


LOSSES: dict[str, Loss] = {
    "viewed": lambda x, y: F.cross_entropy(x.view(-1, VOCABULARY), y.view(-1)),
    "viewed by sizes": lambda x, y: F.cross_entropy(x.view(x.size(0) * x.size(1), -1), y.view(-1)),
    "reshaped": lambda x, y: F.cross_entropy(torch.reshape(x, (-1, x.shape[-1])), y.flatten()),
    "flattened": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "flattened by torch": lambda x, y: F.cross_entropy(torch.flatten(x, end_dim=1), y.flatten()),
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: nn.CrossEntropyLoss()(x.permute(0, 2, 1), y),
    "shifted": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCABULARY), y[..., 1:].contiguous().view(-1)
    ),
    "one sequence": lambda x, y: F.cross_entropy(x[0], y[0], ignore_index=-100),
    "selected": lambda x, y: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "wherever they are": lambda x, y: F.cross_entropy(
        (x if isinstance(x, Tensor) and not hasattr(x, "logits") else x.logits)[0], y[0]
    ),
    "summed by sequence": lambda x, y: (
        F.cross_entropy(x.transpose(1, 2), y, reduction="none").sum(1).pow(2).mean()
    ),
    "smoothed and summed": lambda x, y: nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1)(
        x.flatten(0, -2), y.flatten()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_of_lazy_logits_is_that_of_the_logits(name: str, bias: bool) -> None:
    hidden, weight, shift, labels = draw(bias)
    lazy = LazyLogits(hidden, weight, shift, 4, hidden.dtype)
    assert (lazy.shape, lazy.ndim, lazy.dim()) == ((B, T, VOCABULARY), 3, 3)
    loss = LOSSES[name](lazy, labels)
    expected = LOSSES[name](F.linear(hidden, weight, shift), labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight])
    )


def test_a_cast_decides_the_type_of_the_loss() -> None:
    hidden, weight, _, labels = draw()
    lazy = LazyLogits(hidden.bfloat16(), weight.bfloat16(), None, 4, torch.bfloat16)
    assert F.cross_entropy(lazy[0], labels[0]).dtype == torch.bfloat16
    assert F.cross_entropy(lazy[0].float(), labels[0]).dtype == torch.float32


REFUSED: dict[str, tuple[Loss, str]] = {
    "another function": (lambda x, y: F.log_softmax(x, -1).mean(), "calls log_softmax on them"),
    "a method": (lambda x, y: x.softmax(-1).mean(), r"uses .softmax of them"),
    "a penalty": (lambda x, y: torch.logsumexp(x, -1).mean(), "calls logsumexp on them"),
    "part": (lambda x, y: F.cross_entropy(x[0, :, :20], y[0]), "takes a part of the vocabulary"),
    "narrowed": (lambda x, y: x.to(torch.bfloat16), "casts them to torch.bfloat16"),
    "all in one": (lambda x, y: x.flatten(), "flattens the vocabulary"),
    "other shape": (lambda x, y: x.view(-1, 2), "vocabulary is not the last dimension"),
    "batch second": (lambda x, y: x.transpose(0, 1), "transposes them"),
    "class weights": (
        lambda x, y: F.cross_entropy(x[0], y[0], weight=torch.ones(VOCABULARY)),
        "weighs the classes",
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x[0], torch.ones(T, VOCABULARY)),
        "cross-entropy with probabilities",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_needs_the_logits_is_refused(name: str) -> None:
    loss, message = REFUSED[name]
    hidden, weight, _, labels = draw()
    with pytest.raises(AnalysisError, match=f"cannot be split: the loss .*{message}.*leave out"):
        loss(LazyLogits(hidden, weight, None, 4, hidden.dtype), labels)


class Decoder(nn.Module):
    """A model that is exported: it returns its hidden state and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 61, bias=False)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden, self.head(hidden)


def of_tensor(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def of_attribute(output: Any, batch: Any) -> Tensor:
    return of_tensor(output.logits, batch)


def of_part(output: Any, batch: Any) -> Tensor:
    hidden, logits = output
    return of_tensor(logits, batch) + 0.01 * hidden.pow(2).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "sequential": (lambda: nn.Sequential(nn.Embedding(61, 16), nn.Linear(16, 61)), of_tensor),
    "gpt": (gpt, of_attribute),
    "exported": (Decoder, of_part),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_with_a_loss_of_the_callers_is_split(name: str) -> None:
    torch.manual_seed(0)
    make, loss = MODELS[name]
    model, batch = make(), tokens()
    traced = chain_of(model, batch, loss)
    inputs = traced.bind(batch)
    split = split_head(traced.chain, 4)
    assert split.parameters == traced.chain.parameters

    def run(chain: Any) -> Tensor:
        values = dict(inputs)
        for layer in chain.layers:
            written = layer.run(
                {**layer.parameters, **layer.buffers}, [values[n] for n in layer.reads]
            )
            values.update(zip(layer.writes, written, strict=True))
        result: Tensor = values[chain.loss]
        return result

    losses = run(traced.chain), run(split)
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, list(traced.chain.parameters)) for loss in losses]
    torch.testing.assert_close(*gradients)
    before, after = layer_costs(traced.chain, inputs), layer_costs(split, inputs)
    assert after.layers[-1].kept_bytes < before.layers[-1].kept_bytes
    assert after.layers[:-1] == before.layers[:-1]


def test_an_exported_model_that_does_not_return_its_logits_is_refused() -> None:
    class Squashed(Decoder):
        def forward(self, input_ids: Tensor) -> Any:
            return super().forward(input_ids)[1].tanh()

    chain = chain_of(Squashed(), tokens(), of_tensor).chain
    with pytest.raises(AnalysisError, match="output is not that of a linear layer"):
        split_head(chain, 4)


def test_what_a_loss_does_is_found_when_costs_are_measured() -> None:
    batch = tokens()
    traced = chain_of(gpt(), batch, lambda output, _: output.logits.pow(2).mean())
    with pytest.raises(AnalysisError, match=r"the loss uses .pow of them"):
        layer_costs(split_head(traced.chain, 2), traced.bind(batch))
