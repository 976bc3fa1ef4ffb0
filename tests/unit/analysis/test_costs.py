"""What layers cost, where a wrong figure would only make plans worse and nobody notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts


def costs_of(*layers: nn.Module, width: int = 5) -> ChainCosts:
    """Return the costs of layers between a first and a last one, for three rows."""
    example = (torch.randn(3, width), torch.zeros(1))
    model = nn.Sequential(nn.Linear(width, width), *layers, nn.Linear(width, 1))
    traced = chain_of(model, example, torch.sum)
    return layer_costs(traced.chain, traced.bind(example))


class Attention(nn.Module):
    """Attention of rows to each other."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, value: Tensor) -> Tensor:
        rows = value[None, None]
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=self.dropout)[0, 0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_random_numbers_if_it_drops_something(dropout: float) -> None:
    assert costs_of(Attention(dropout)).layers[1].random == (dropout > 0)


class Shifted(nn.Module):
    """Adds a table that may be another layer's too."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.table


def test_a_buffer_of_several_layers_counts_once() -> None:
    table = torch.randn(3, 5)
    shared, own = costs_of(*(Shifted(table) for _ in range(3))), costs_of(Shifted(table))
    assert own.layers[1].buffer_bytes == table.nbytes
    assert sum(cost.buffer_bytes for cost in shared.layers) == table.nbytes


def test_backward_of_a_matrix_product_needs_its_gradients_and_no_more() -> None:
    rows, width, item = 3, 5, 4
    cost = costs_of(nn.Linear(width, width)).layers[1]
    gradients = item * (rows * width + width * width + width)
    assert item * rows * width <= cost.backward_bytes <= gradients


ROW_BYTES = 5 * 4


class _Scratch(torch.autograd.Function):
    """Adds nothing, with memory of known sizes: 7 rows while it runs, 11 that it keeps, 13 in
    backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        kept, scratch = value.new_empty(11, 5), value.new_empty(7, 5)
        ctx.save_for_backward(kept)
        out = value.clone()
        del scratch
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        scratch = kept.new_empty(13, 5)
        out = upstream.clone()
        del scratch
        return out


class Scratch(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        more = value.new_empty(2, 5) if torch.is_grad_enabled() else None
        out: Tensor = _Scratch.apply(value)
        del more
        return out


def test_bytes_are_those_of_what_is_alive_at_once() -> None:
    """Of three rows: what goes in is there already, what comes back for what goes out too."""
    cost = costs_of(Scratch()).layers[1]
    assert cost.forward_bytes == ROW_BYTES * (7 + 11 + 3)
    assert cost.graph_bytes == ROW_BYTES * (2 + 7 + 11 + 3)
    assert cost.kept_bytes == ROW_BYTES * (11 + 3)
    assert cost.backward_bytes == ROW_BYTES * (13 + 3)
    assert cost.saved.inner_bytes == cost.saved.sent_bytes == ROW_BYTES * 11
    assert cost.saved.sent == 1
    assert cost.saved.forward_bytes == cost.graph_bytes
    assert cost.saved.backward_bytes == ROW_BYTES * (11 + 13 + 3)
    assert not cost.saved.movable, "its function might keep more than hooks see"
    assert (cost.saved.reads, cost.saved.writes) == ((False,), (False,))


def test_operations_are_counted_by_direction() -> None:
    rows, width = 3, 5
    cost = costs_of(nn.Linear(width, width)).layers[1]
    assert cost.forward_flops == 2 * rows * width * width
    assert cost.backward_flops == 2 * cost.forward_flops, "of the input, and of the weight"


class Tied(nn.Module):
    """Uses one weight twice, and has a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.calls.add_(1)
        out: Tensor = self.second(self.first(value))
        return out


def test_a_weight_that_a_layer_uses_twice_counts_once() -> None:
    cost = costs_of(Tied()).layers[1]
    assert cost.parameters == 25 + 5 + 5
    assert cost.parameter_bytes == 4 * cost.parameters


def test_a_layer_that_changes_its_buffers_says_so() -> None:
    tied, plain = costs_of(Tied()).layers[1], costs_of(Shifted(torch.randn(3, 5))).layers[1]
    assert (tied.changes_buffers, plain.changes_buffers) == (True, False)
    assert tied.buffer_bytes == 4


def test_equal_layers_are_of_one_kind_and_others_of_another() -> None:
    layers = costs_of(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)).layers
    kinds = [cost.kind for cost in layers]
    # What the first one reads needs no gradient.
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 4
    assert [cost.name for cost in layers] == ["0", "1", "2", "3", "4"]
