"""What is made again in backward instead of being sent to the host has the bits that were saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.analysis import LayerCost, chain_of, layer_costs
from atomtrain.analysis.costs.rematerialization import RematerializedOperation
from atomtrain.optimizers import AdamW
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.swapped import (
    check,
    deep_gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH = 12
BOTH = pytest.mark.parametrize("remakes", [True, False])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(97)


class ByHand(nn.Module):
    """A normalisation written out, a gate, and weights that see both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.gate, self.up = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        normal = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)
        normal = self.scale * normal
        out: Tensor = self.down(F.silu(self.gate(normal)) * self.up(normal))
        return value + out


class Turned(nn.Module):
    """Copies of parts of what is saved, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.25)

    def forward(self, value: Tensor) -> Tensor:
        first, second = torch.tanh(self.before(value)).chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        turned = turned.view(-1, 2, WIDTH // 2).transpose(0, 1).contiguous()
        out: Tensor = self.after(turned.transpose(0, 1).reshape(-1, WIDTH))
        return self.dropout(out)


class Overwriting(nn.Module):
    """What a cheap operation made is changed before it is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        normal = F.layer_norm(value, (WIDTH,))
        inside = F.gelu(self.first(normal))
        inside.mul_(0.5)
        inside[:, 0] = 0.0
        return self.third(F.relu(self.second(inside), inplace=True)) + inside


class Results(nn.Module):
    """What the layer hands on is saved by itself too, and what it reads by several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        normal: Tensor = self.norm(value)
        return normal + 0.0 * self.out(normal).sum() * normal.sigmoid()


class Rotating(nn.Module):
    """The same memory as real and as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.randn(WIDTH // 2, 2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        numbers = torch.view_as_complex((1.5 * value).view(-1, WIDTH // 2, 2))
        turned = numbers * torch.view_as_complex(self.phase)
        out: Tensor = self.out(torch.view_as_real(turned).flatten(1))
        return out


class Chains(nn.Module):
    """Sixty cheap operations one after the other, each on what is before it twice: nothing of it
    saved, or everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        alone = gated = F.layer_norm(value, (WIDTH,))
        for _ in range(30):
            alone = (alone + alone) * 0.5
            gated = gated * (1.5 * gated).sigmoid()
        for _ in range(14):
            value = (value + value) * 0.5
        out: Tensor = self.first(alone) + self.second(gated) + self.out(value)
        return out


def model() -> nn.Module:
    return nn.Sequential(
        ByHand(), nn.LayerNorm(WIDTH), nn.GELU(), Turned(), Overwriting(), Results(), nn.SiLU(),
        nn.Linear(WIDTH, 3),
    )  # fmt: skip


@pytest.mark.parametrize("bounds", [(0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 7), (0, 3, 6), (0, 1, 6)])
@pytest.mark.parametrize("slots", [1, 3])
@BOTH
def test_bits_of_odd_models(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, ...], slots: int, remakes: bool
) -> None:
    how: Any = (*("offload",) * (len(bounds) - 1), "recompute")
    use_shape(monkeypatch, Shape(bounds, (*bounds, 8), slots, 1, activations=how, remakes=remakes))
    steps = [pairs([6, 6, 5], WIDTH) for _ in range(2)]
    check(model(), steps, loss_of=sequential_loss, loss=regression, inject=random_delays(slots))


@BOTH
def test_bits_of_memory_that_is_seen_in_two_types(
    monkeypatch: pytest.MonkeyPatch, remakes: bool
) -> None:
    how: Any = ("offload", "offload", "recompute")
    use_shape(monkeypatch, Shape((0, 1, 2), (0, 1, 2, 3), 2, 1, activations=how, remakes=remakes))
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rotating(), nn.Linear(WIDTH, 3))
    steps = [pairs([6, 6], WIDTH) for _ in range(2)]
    check(network, steps, loss_of=sequential_loss, loss=regression)


def test_bits_of_long_chains_of_cheap_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((0, 1, 2), (0, 1, 2, 3), 2, 1, activations=("offload", "offload", "recompute"))
    use_shape(monkeypatch, shape)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), Chains(), nn.Linear(WIDTH, 3))
    steps = [pairs([6, 5], WIDTH) for _ in range(2)]
    check(network, steps, loss_of=sequential_loss, loss=regression)


@pytest.mark.parametrize("of", [ByHand, Chains])
def test_where_all_is_sent_nothing_is_made_again(
    monkeypatch: pytest.MonkeyPatch, of: type[nn.Module]
) -> None:
    """It takes host memory instead, as much as is predicted."""
    how: Any = ("offload", "offload", "recompute")
    host_bytes, made = [], []
    result = RematerializedOperation.result
    monkeypatch.setattr(
        RematerializedOperation, "result", lambda *args: made.append(args) or result(*args)
    )
    for remakes in (True, False):
        shape = Shape((0, 1, 2), (0, 1, 2, 3), 2, 1, activations=how, remakes=remakes)
        use_shape(monkeypatch, shape)
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH), of(), nn.Linear(WIDTH, 3))
        step = pairs([6, 6], WIDTH)
        with swap(network, step[0], AdamW, micro_batches=2, loss=regression) as engine:
            assert engine.plan.remakes is remakes
            made.clear()
            engine.step(step)
            assert bool(made) is remakes
            host_bytes.append((engine.plan.host_bytes, engine._core.executor.pool.total_bytes))
    (remaking, little), (sending, much) = host_bytes
    assert little < much
    assert sending - remaking >= much - little


def test_bits_of_bfloat16() -> None:
    steps, losses = token_batches(2, steps=2), []
    for how in ("recompute", "offload"):
        torch.manual_seed(5)
        options: dict[str, Any] = {"precision": "bf16", "micro_batches": 2, "segments": 5}
        network = deep_gpt(0.2, tied=False)
        with swap(network, steps[0][0], AdamW, activations=how, **options) as engine:
            losses.append([engine.step(step) for step in steps])
    assert losses[0] == losses[1]


def cost_of(layer: nn.Module, example: Tensor) -> LayerCost:
    width = example.shape[-1]
    whole = nn.Sequential(nn.Linear(width, width), layer, nn.Linear(width, 3))
    traced = chain_of(whole, (example, torch.zeros(1)), torch.sum)
    return layer_costs(traced.chain, traced.bind((example, torch.zeros(1)))).layers[1]


def test_what_a_block_sends() -> None:
    """Inputs of normalisations, queries, keys and values, what attention mixed and one number a
    head and token with it, and what goes into the activation function."""
    batch = token_batches(1)[0][0]
    network = deep_gpt(0.0, tied=False)
    traced = chain_of(network, batch, None)
    cost = layer_costs(traced.chain, traced.bind(batch)).layers[1]
    saved = cost.saved
    row = 4 * batch["input_ids"].numel() * 16
    assert saved.reads == (True,), "the first normalisation's input"
    assert saved.sent_bytes == row * (1 + 3 + 1 + 4) + row * 2 // 16
    stats, remade = 2 * 2 * row // 16, row * (1 + 1 + 4)
    assert saved.inner_bytes == saved.sent_bytes + stats + remade
    assert saved.sent == 5
    # Both normalisations (with their weights and biases) and the activation function, once each.
    assert saved.remade_traffic_bytes == 2 * remade + stats + 4 * 4 * 16
    # Or all of it: what normalisations found about rows, and three results.
    whole = cost.all_sent
    assert whole is not None
    assert whole.sent_bytes == whole.inner_bytes == saved.inner_bytes
    assert whole.sent == saved.sent + 4 + 3
    assert whole.remade_traffic_bytes == 0


def test_what_a_gate_sends() -> None:
    rows, item = 7, 4
    saved = cost_of(ByHand(), torch.randn(rows, WIDTH)).saved
    # Its input is a value; inside, gate and factor.
    assert saved.reads == (True,)
    assert saved.sent_bytes == item * rows * 2 * 20
    assert saved.inner_bytes == saved.sent_bytes + item * rows * (2 * WIDTH + 2 * 20 + 1)
