"""What layers cost, where a wrong figure would only make plans worse and nobody notice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs import ChainCosts


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
