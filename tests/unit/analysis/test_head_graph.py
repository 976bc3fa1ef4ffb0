"""Heads that are found in graphs and in chains, those that are not, and how many pieces suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from atomtrain.analysis import Chain, Layer, chain_of, layer_costs
from atomtrain.analysis.head.head import split_head, split_head_as_needed
from atomtrain.analysis.head.head_graph import split_graph
from atomtrain.analysis.head.pieces import OPERATION, linear_cross_entropy
from atomtrain.engine.options import Options
from atomtrain.errors import AnalysisError, ConfigError
from tests.support.engine_models import gpt, tokens

WIDTH, VOCABULARY = 8, 29
Head = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Model(nn.Module):
    """A model whose loss is `head(hidden, weight, bias, labels)`."""

    def __init__(self, head: Head, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH).to(dtype))
        self.bias = nn.Parameter(torch.randn(VOCABULARY).to(dtype))
        self._head = head

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        return self._head(self.hidden(hidden), self.weight, self.bias, labels)


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return hidden `[2, 5, D]` and labels `[2, 5]`, one of which does not count."""
    labels = torch.randint(VOCABULARY, (2, 5))
    labels[0, 1] = -100
    return torch.randn(2, 5, WIDTH).to(dtype), labels


def graph_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    graph = torch.export.export(model, inputs, strict=False).module()
    assert isinstance(graph, fx.GraphModule)
    return graph


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1), **options)


def shifted(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w, b)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten())


def projected(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """As GPT-2's own layers multiply: one `addmm` with a weight `[D, V]`."""
    return F.cross_entropy(torch.addmm(b, h.view(-1, WIDTH), w.t()), y.flatten())


HEADS: dict[str, Head] = {
    "flattened": lambda h, w, b, y: flat(F.linear(h, w, b), y),
    "without a bias": lambda h, w, b, y: flat(F.linear(h, w), y),
    "shifted by a token": shifted,
    "classes second": lambda h, w, b, y: F.cross_entropy(F.linear(h, w).transpose(1, 2), y),
    "permuted": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b).permute(0, 2, 1), y),
    "multiplied": lambda h, w, b, y: flat(h @ w.T, y),
    "projected": projected,
    "scaled": lambda h, w, b, y: flat(0.25 * F.linear(h, w) / 3, y),
    "smoothed": lambda h, w, b, y: flat(F.linear(h, w, b), y, label_smoothing=0.1),
    "summed": lambda h, w, b, y: flat(F.linear(h, w, b), y, reduction="sum") / 7,
    "another label ignored": lambda h, w, b, y: flat(F.linear(h, w), y.clamp(0), ignore_index=0),
    "two losses": lambda h, w, b, y: flat(F.linear(h, w), y) + flat(F.linear(-h, w, b), y),
    "with another loss": lambda h, w, b, y: flat(F.linear(h, w), y) + 0.01 * h.pow(2).mean(),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_a_graph_is_replaced(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Model(HEADS[name]).double(), example(torch.float64)
    graph = graph_of(model, inputs)
    before = graph.code
    split = fx.GraphModule(graph, split_graph(graph.graph, 4))
    assert graph.code == before, "the given graph is left as it is"
    targets = [node.target for node in split.graph.nodes]
    assert targets.count(OPERATION) == (2 if name == "two losses" else 1)
    assert not {torch.ops.aten.cross_entropy_loss.default} & set(targets)
    assert all(split.get_parameter(n) is model.get_parameter(n) for n in ("weight", "hidden.bias"))
    loss, expected = split(*inputs), model(*inputs)
    torch.testing.assert_close(loss, expected)
    leaves = list(model.parameters())
    for actual, wanted in zip(
        torch.autograd.grad(loss, leaves, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("upcast", [True, False])
def test_a_half_precision_head_keeps_the_type_of_its_loss(upcast: bool) -> None:
    def head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        logits = F.linear(h, w)
        return flat(logits.float() if upcast else logits, y)

    torch.manual_seed(0)
    model, inputs = Model(head, torch.bfloat16), example(torch.bfloat16)
    graph = graph_of(model, inputs)
    split = fx.GraphModule(graph, split_graph(graph.graph, 3))
    loss, expected = split(*inputs), model(*inputs)
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected)


def in_pieces(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return linear_cross_entropy(h.flatten(0, 1), w, b, y.flatten(), pieces=2)


def test_a_model_in_pieces_keeps_them_in_its_graph_and_can_change_their_number() -> None:
    torch.manual_seed(0)
    model, inputs = Model(in_pieces), example()
    graph = graph_of(model, inputs).graph
    for pieces in (1, 5):
        changed = split_graph(graph, pieces)
        assert [n.args[4] for n in changed.nodes if n.target is OPERATION] == [pieces]
    leaves = list(model.parameters())
    whole = fx.GraphModule(graph_of(model, inputs), graph)
    gradients = torch.autograd.grad(whole(*inputs), leaves)
    expected = torch.autograd.grad(model(*inputs), leaves)
    assert all(map(torch.equal, gradients, expected)), "the exported graph is the model bit for bit"


REFUSED: dict[str, tuple[Head, str]] = {
    "no loss": (lambda h, w, b, y: F.linear(h, w).sum(), "does not call .*cross_entropy"),
    "no linear": (
        lambda h, w, b, y: flat((h @ w.T).tanh(), y),
        "tanh.default stands between its linear layer and cross_entropy",
    ),
    "scaled with a bias": (lambda h, w, b, y: flat(2 * F.linear(h, w, b), y), "bias and are mult"),
    "weighted": (
        lambda h, w, b, y: flat(F.linear(h, w), y, weight=b.detach().exp()),
        "weighs the classes",
    ),
    "probabilities": (
        lambda h, w, b, y: F.cross_entropy(F.linear(h, w)[0], F.softmax(h @ w.T, -1)[1]),
        "probabilities instead of labels",
    ),
    "unreduced": (
        lambda h, w, b, y: flat(F.linear(h, w), y, reduction="none").mean(),
        "does not reduce to one number",
    ),
    "logits returned": (
        lambda h, w, b, y: (flat(logits := F.linear(h, w), y), logits),
        "logits are also used by the model's output",
    ),
    "logits used": (
        lambda h, w, b, y: flat(logits := F.linear(h, w), y) + logits.pow(2).mean(),
        "logits are also used by aten.pow",
    ),
    "narrowed": (
        lambda h, w, b, y: flat(F.linear(h, w).to(torch.bfloat16), y),
        "aten.to.dtype stands between",
    ),
    "part of the vocabulary": (
        lambda h, w, b, y: F.cross_entropy(F.linear(h, w)[0, :, :20], y[0].clamp(0, 19)),
        "aten.slice.Tensor stands between",
    ),
    "no class dimension to move": (
        lambda h, w, b, y: F.cross_entropy(F.linear(h, w), torch.zeros(2, VOCABULARY).long()),
        "aten.linear.default stands before cross_entropy",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_cannot_be_split_says_why(name: str) -> None:
    head, message = REFUSED[name]
    with pytest.raises(AnalysisError, match=f"the head cannot be split: .*{message}"):
        split_graph(graph_of(Model(head), example()).graph, 4)


def test_a_chain_of_our_own_model_is_split_and_shares_everything() -> None:
    model, batch = gpt(), tokens()
    traced = chain_of(model, batch)
    split = split_head(traced.chain, 3)
    assert [layer.name for layer in split.layers] == [layer.name for layer in traced.chain.layers]
    assert split.layers[:-1] == traced.chain.layers[:-1]
    assert split.parameters == traced.chain.parameters
    assert split.names is traced.chain.names
    assert (split.layers[-1].module.pieces, model.head.pieces) == (3, 1)
    assert split_head(split, 1).layers[-1].module.pieces == 1


def test_a_chain_that_ends_in_a_graph_is_split() -> None:
    torch.manual_seed(0)
    model, inputs = Model(HEADS["flattened"]), example()
    last = Layer("head", graph_of(model, inputs), ("hidden", "labels"), ("loss",))
    chain = Chain((last,), ("hidden", "labels"), "loss", {})
    (loss,) = split_head(chain, 1).layers[0].run(dict(last.parameters), inputs)
    assert torch.equal(loss, model(*inputs)), "1 piece keeps the bits"
    split = split_head(chain, 4)
    assert split.parameters == chain.parameters
    (loss,) = split.layers[0].run(dict(last.parameters), inputs)
    torch.testing.assert_close(loss, model(*inputs))


def test_a_chain_that_ends_in_another_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 9)))
    x, y = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    chain = chain_of(model, (x, y), lambda output, batch: F.cross_entropy(output, batch[1])).chain
    with pytest.raises(AnalysisError, match=r"Sequential, is neither an nn.Linear nor exported"):
        split_head(chain, 4)
    assert split_head(chain, 1).layers[-1].module is chain.layers[-1].module
    with pytest.raises(ConfigError, match="pieces must be at least 1, not 0"):
        split_head(chain, 0)


@pytest.mark.slow
def test_as_many_pieces_as_are_needed() -> None:
    """With a wide vocabulary the head needs most, so it is split until it no longer does."""

    def work_bytes(cost: Any) -> int:
        return max(cost.graph_bytes, cost.kept_bytes + cost.backward_bytes)

    def split(vocabulary: int, width: int = 16) -> tuple[int, Any, Any]:
        batch = tokens(vocabulary=vocabulary, length=32)
        traced = chain_of(gpt(vocabulary=vocabulary, width=width), batch)
        inputs = traced.bind(batch)
        costs = layer_costs(traced.chain, inputs)
        chain = split_head_as_needed(traced.chain, costs)
        return chain.layers[-1].module.pieces, costs, layer_costs(chain, inputs)

    pieces, before, after = split(4096)
    assert pieces > 1
    assert work_bytes(after.layers[-1]) < work_bytes(before.layers[-1]) / 2
    assert split(32)[0] == 1, "the blocks need more than the head"


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda o, y: F.cross_entropy(o.tanh(), y)])
def test_auto_leaves_alone_what_it_cannot_split(loss: Any) -> None:
    last = nn.Linear(4, 900)
    model = nn.Sequential(
        nn.Linear(4, 4), last if loss is not F.cross_entropy else nn.Sequential(last)
    )
    x, y = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    traced = chain_of(model, (x, y), lambda output, batch: loss(output, batch[1]))
    costs = layer_costs(traced.chain, traced.bind((x, y)))
    assert split_head_as_needed(traced.chain, costs) is traced.chain


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "all", "4"])
def test_options_refuse_what_is_no_number_of_pieces(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="head_pieces must be at least 1, 'auto', or None"):
        Options(head_pieces=wrong)


def test_options_take_a_number_auto_or_nothing() -> None:
    assert [Options(head_pieces=p).head_pieces for p in (1, 64, "auto", None)] == [
        1,
        64,
        "auto",
        None,
    ]
