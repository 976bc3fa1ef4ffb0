"""Offloaded layers that run by programs, without a graph, train with the bits of resident ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from atomtrain.engine.execution.program_runs import ForgottenRun, OffloadedRun, ProgramRun
from atomtrain.optimizers import AdamW
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.swapped import check, pairs, random_delays, regression, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH, HEADS = 16, 2
OPTIONS: dict[str, Any] = {"activations": "offload", "segments": 6, "slots": 2, "host_layers": 0}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[ProgramRun]:
    """Hold all that ran by programs."""
    found: list[ProgramRun] = []

    def note(name: str) -> None:
        run_layer = getattr(ProgramRun, name)

        def noted(run: ProgramRun, values: Any) -> Any:
            found.append(run)
            return run_layer(run, values)

        monkeypatch.setattr(ProgramRun, name, noted)

    note("forward")
    note("again")
    return found


class Attention(nn.Module):
    """Attention and a gate, each behind a normalisation written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH)
        self.register_buffer("turn", torch.randn(WIDTH // HEADS))

    def normal(self, value: Tensor) -> Tensor:
        return self.scale * value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, value: Tensor) -> Tensor:
        rows, _ = value.shape
        heads = self.qkv(self.normal(value)).view(rows, 3, HEADS, -1).permute(1, 2, 0, 3)
        query, key, kept = heads.unbind(0)
        query = query * self.turn + torch.cat((-query[..., 4:], query[..., :4]), -1)
        mixed = F.scaled_dot_product_attention(query[None], key[None], kept[None], is_causal=True)
        value = value + self.out(mixed[0].transpose(0, 1).reshape(rows, -1))
        inside = self.normal(value)
        out: Tensor = value + self.down(F.silu(self.gate(inside)) * self.up(inside))
        return out


class LayerNorms(nn.Module):
    """PyTorch's own normalisation, and a result that is read as another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        left, right = self.first(self.norm(value)).chunk(2, -1)
        out: Tensor = value + self.second(torch.tanh(left) * F.gelu(right))
        return out


class Masked(nn.Module):
    """Makes a mask of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        rows, _ = value.shape
        mask = torch.full((rows, rows), float("-inf"), device=value.device).triu(1)
        weights = torch.softmax(value @ value.T + mask, -1)
        out: Tensor = weights @ self.linear(value)
        return out


class Half(nn.Module):
    """Frozen but for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = value + self.whole(value) + self.up(self.down(value))
        return out


class Noisy(nn.Module):
    """Draws random numbers into memory that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = value + self.dropout(torch.tanh(self.linear(value)))
        return out


class Twice(nn.Module):
    """Reads what an earlier block wrote, beside the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, earlier: Tensor) -> Tensor:
        out: Tensor = self.linear(value * earlier).sigmoid() + earlier
        return out


class Net(nn.Module):
    """A chain that is exported, since its forward is its own."""

    def __init__(self, *blocks: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, value: Tensor) -> Tensor:
        value = earlier = self.first(value)
        for block in self.blocks:
            before = value
            value = block(value, earlier) if isinstance(block, Twice) else block(value)
            earlier = before
        out: Tensor = self.last(value)
        return out


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return regression(model(batch[0]), batch)


def trained(*blocks: type[nn.Module], rows: tuple[int, ...] = (6, 6, 6), **options: Any) -> None:
    steps = [pairs(rows, WIDTH) for _ in range(3)]
    check(Net(*blocks), steps, loss_of=loss_of, loss=regression, **{**OPTIONS, **options})


@pytest.mark.parametrize("bounds", [(0, 1, 2, 3, 4, 5), (0, 3, 5)])
@pytest.mark.parametrize("activations", ["offload", "keep", "recompute"])
@pytest.mark.parametrize("block", [Attention, LayerNorms, Masked, Half])
def test_bits(
    monkeypatch: pytest.MonkeyPatch,
    runs: list[ProgramRun],
    block: type[nn.Module],
    activations: Any,
    bounds: tuple[int, ...],
) -> None:
    """Without a peak above the plan's, as `check` sees to."""
    how = (*(activations,) * (len(bounds) - 1), "recompute")
    use_shape(monkeypatch, Shape(bounds, (*bounds, 6), 2, 1, activations=how))
    trained(block, block, block, block, inject=random_delays(len(bounds)))
    # In all layers but the last of three steps of three micro-batches. Of what is recomputed the
    # first micro-batch is all that autograd runs, of others the first step.
    by_autograd = 1 if activations == "recompute" else 3
    forgotten = sum(isinstance(run, ForgottenRun) for run in runs)
    assert len(runs) - forgotten == (3 * 3 - by_autograd) * 5
    # Forward of what is recomputed, as soon as backward of a step has told how.
    assert forgotten == (2 * 3 * 5 if activations == "recompute" else 0)


def test_bits_where_all_is_sent(runs: list[ProgramRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.engine.execution.programs.CHEAP", frozenset())
    trained(Attention, LayerNorms, Attention, LayerNorms)
    assert runs


def test_what_is_made_again_is_not_sent(runs: list[ProgramRun]) -> None:
    trained(Attention, Attention, Attention, Attention)
    sent = {len(run._sent) for run in runs if isinstance(run, OffloadedRun)}
    # Its input; query, key and value as one; attention's result and its sums; the second
    # normalisation's input; the gate and its factor.
    assert sent == {7}


@pytest.mark.parametrize("block", [Noisy, Twice])
def test_others_stay_with_autograd(runs: list[ProgramRun], block: type[nn.Module]) -> None:
    trained(block, block, block, block)
    assert {run.known.layer.name for run in runs} <= {"first"}


def test_they_stand_beside_each_other(runs: list[ProgramRun]) -> None:
    trained(Attention, Twice, Noisy, LayerNorms, clip_norm=0.1)
    assert runs


def test_what_cannot_be_traced_stays_with_autograd(
    runs: list[ProgramRun], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(*_arguments: Any) -> Any:
        raise RuntimeError("no kernel for tensors without data")

    monkeypatch.setattr("atomtrain.engine.execution.programs.make_fx", refusing)
    trained(Half, Half, Half, Half)
    assert not runs
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("run by autograd" in line and "no kernel" in line for line in said)


def test_under_autocast_autograd_decides(runs: list[ProgramRun]) -> None:
    step = pairs((6, 6), WIDTH)
    with swap(Net(*[Half] * 4), step[0], loss=regression, micro_batches=2, **OPTIONS) as engine:
        engine.step(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.step(step)
        assert not runs
        engine.step(step)
        assert runs


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "switch", [lambda: sdpa_kernel(SDPBackend.MATH), torch.autograd.detect_anomaly]
)
def test_what_the_process_is_told_counts(runs: list[ProgramRun], switch: Any) -> None:
    step = pairs((6, 6), WIDTH)
    with swap(Net(*[Half] * 4), step[0], loss=regression, micro_batches=2, **OPTIONS) as engine:
        engine.step(step)
        engine.step(step)
        before = len(runs)
        with switch():
            engine.step(step)
        assert len(runs) == before > 0
        engine.step(step)
        assert len(runs) > before


@pytest.mark.skipif(not hasattr(torch.empty(0), "grad_dtype"), reason="torch is older than 2.10")
def test_bits_of_gradients_in_float32(runs: list[ProgramRun]) -> None:
    losses = []
    steps = [pairs((6, 6), WIDTH) for _ in range(3)]
    for activations in ("recompute", "offload"):
        torch.manual_seed(7)
        options = {**OPTIONS, "activations": activations, "gradient_dtype": "float32"}
        network = Net(*[Attention] * 4).bfloat16()
        wide = [[(a.bfloat16(), b.bfloat16()) for a, b in step] for step in steps]
        with swap(
            network, wide[0][0], AdamW, loss=regression, micro_batches=2, **options
        ) as engine:
            losses.append([engine.step(step) for step in wide])
    assert losses[0] == losses[1]
    assert runs


@pytest.mark.parametrize("optimizer_on_device", [False, True])
def test_bits_of_shared_and_frozen_weights(
    runs: list[ProgramRun], optimizer_on_device: bool
) -> None:
    """Of one micro-batch, since the order of several is another one."""
    network = Net(Attention, LayerNorms, Attention, LayerNorms)
    network.blocks[2].gate = network.blocks[0].gate
    network.blocks[1].norm.requires_grad_(False)
    options = {**OPTIONS, "optimizer_on_device": optimizer_on_device}
    steps = [pairs((6,), WIDTH) for _ in range(3)]
    check(network, steps, loss_of=loss_of, loss=regression, **options)
    assert runs
