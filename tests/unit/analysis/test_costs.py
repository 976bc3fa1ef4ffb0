"""What layers cost, where a wrong figure would only make plans worse and nobody notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.flops import attention_workspace_bytes, more_counters
from tests.support.software_gpu import installed


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


class Heads(nn.Module):
    """Heads of 40 columns for 200 tokens: neither is what kernels round to."""

    def __init__(self, heads_of_keys: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(160, 160 + 2 * 40 * heads_of_keys)
        self.heads_of_keys = heads_of_keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.project(x).view(2, 200, -1, 40).transpose(1, 2)
        query, key, value = split.split([4, self.heads_of_keys, self.heads_of_keys], 1)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=self.heads_of_keys < 4
        )
        return out.transpose(1, 2).reshape(2, 200, 160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_float32_sums_of_attention_on_a_gpu_count(dtype: torch.dtype) -> None:
    model = nn.Sequential(Heads().to(dtype), nn.Linear(160, 1, dtype=dtype))
    example = torch.randn(2, 200, 160, dtype=dtype)
    traced = chain_of(model, example, torch.mean)
    here, there = (
        layer_costs(traced.chain, traced.bind(example), on_gpu=on_gpu).layers[0]
        for on_gpu in (False, True)
    )
    sums_bytes = 4 * 2 * 4 * 256 * (64 + 1)
    expected = sums_bytes if dtype is torch.bfloat16 else 0
    assert there.backward_bytes - here.backward_bytes <= expected
    assert attention_workspace_bytes(
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        [torch.empty(2, 4, 200, 40, dtype=dtype)] * 4,
        on_gpu=True,
    ) == expected  # fmt: skip
    if dtype is torch.bfloat16:
        assert there.backward_bytes > here.backward_bytes
        assert there.saved.backward_bytes > here.saved.backward_bytes
    else:
        assert there == here


def test_what_attention_takes_inside_depends_on_heads_and_determinism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key = (torch.empty(1, heads, 128, 64, dtype=torch.float16) for heads in (8, 2))
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention_backward.default
    cudnn = aten._scaled_dot_product_cudnn_attention_backward.default
    sums, rows, wide = 4 * 8 * 128 * 64, 4 * 8 * 128, 2 * 2 * 8 * 128 * 64

    def taken(func: Any, keys: torch.Tensor) -> int:
        return attention_workspace_bytes(func, [query, query, keys, keys], on_gpu=True)

    assert taken(flash, query) == taken(cudnn, query) == sums + rows
    assert taken(flash, key) == sums + rows + wide
    assert taken(aten._scaled_dot_product_flash_attention.default, query) == 0, "forward"
    assert taken(aten.mm.default, query) == 0
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    with installed():  # 132 processors, so 17 for each head
        assert taken(flash, query) == 17 * sums + rows
        assert taken(cudnn, query) == sums + rows


class Part(nn.Module):
    """Hands on a part of what it computes; that of its input as it is."""

    def forward(self, value: Tensor) -> Tensor:
        return value.repeat(1, 20)[:, :5]


class Joined(nn.Module):
    """The gradient of what it joins lies in a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(3, 95))

    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([value, self.more], 1)


def test_a_value_holds_all_that_it_lies_in() -> None:
    costs = costs_of(Part(), nn.Identity(), nn.Linear(5, 5))
    part, same, own = [list(costs.values.values())[-4 + index] for index in range(3)]
    assert part.n_bytes == same.n_bytes == own.n_bytes == 3 * 5 * 4
    assert part.held_bytes == same.held_bytes == 3 * 100 * 4
    assert own.held_bytes == own.n_bytes


def test_a_value_counts_what_its_gradient_lies_in() -> None:
    traced_width = 5
    costs = costs_of(Joined(), nn.Linear(100, traced_width))
    joined_reads, joined = [list(costs.values.values())[-4 + index] for index in range(2)]
    assert joined_reads.n_bytes == 3 * 5 * 4
    assert joined_reads.held_bytes == joined.n_bytes == 3 * 100 * 4


@pytest.mark.parametrize("kind", ["flash_attention_for_cpu", "efficient_attention"])
def test_heads_that_share_keys_count_like_heads_of_their_own(kind: str) -> None:
    aten = torch.ops.aten
    forward = getattr(aten, f"_scaled_dot_product_{kind}")
    backward = getattr(aten, f"_scaled_dot_product_{kind}_backward")
    counters = more_counters()
    query, shared, own = (2, 8, 16, 4), (2, 2, 16, 4), (2, 8, 16, 4)
    product = 2 * 2 * 8 * 16 * 16 * 4  # of queries with keys, or of weights with values
    assert counters[forward](query, shared, shared) == counters[forward](query, own, own)
    assert counters[forward](query, shared, shared) == 2 * product
    assert counters[backward](query, query, shared, shared) == counters[backward](
        query, query, own, own
    )
