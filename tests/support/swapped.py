"""What tests of swapped training share: small models, batches, delays, and the comparison."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis import Layer
from atomtrain.engine.devices.streams import Inject
from atomtrain.models import GPT, GPTConfig
from tests.support.injecting import device_with
from tests.support.reference import assert_equal_training, gpt_loss, train, twin

STEPS = 3
LAYERS = 4
"""Of `gpt`: embedding, two blocks, head."""
DEEP_LAYERS = 5
"""Of `deep_gpt`."""
TIED = DEEP_LAYERS
"""Its block of the tied weight."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def gpt(dropout: float = 0.0, tied: bool = True, layers: int = 2) -> GPT:
    """A small GPT of odd sizes; the chain has an embedding and a head besides its layers."""
    config = GPTConfig(
        layers=layers, width=30, heads=3, head_width=7, vocabulary=101, context=19, dropout=dropout
    )
    model = GPT(config)
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(101, 30) * 0.02)
    return model


def token_batches(
    micro_batches: int, steps: int = STEPS, sequences: int = 3
) -> list[list[dict[str, Tensor]]]:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(101, (sequences, 18))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return [[batch() for _ in range(micro_batches)] for _ in range(steps)]


def random_delays(seed: int) -> Callable[[str], None]:
    """Delay every job of every stream, and compute, by up to 2 ms."""
    source = random.Random(seed)
    return lambda _: time.sleep(source.random() * 2e-3)


def swap(
    model: nn.Module,
    example: Any,
    optimizer: Any = adamw,
    loss: Any = None,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        example,
        optimizer=optimizer,
        device=device_with(inject, "emulated:1GiB/s", "64MiB"),
        device_memory="64MiB",
        loss=loss,
        options=atomtrain.Options(**{"optimizer_on_device": False, **options}),
    )


def check(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimizer: Any = adamw,
    loss_of: Any = gpt_loss,
    loss: Any = None,
    example: Any = None,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> atomtrain.Engine:
    """Train a model and its twin from the same random state; compare every bit.

    `example` is the largest micro-batch; `None` is the first. `weights` are those of every step.
    """
    reference = twin(model)
    resident = optimizer(reference.parameters())
    state = torch.get_rng_state()
    clip_norm = options.get("clip_norm")
    expected = train(reference, steps, resident, loss_of, clip_norm, weights)
    left_at = torch.get_rng_state()
    torch.set_rng_state(state)
    options.setdefault("micro_batches", len(steps[0]))
    example = steps[0][0] if example is None else example
    with swap(model, example, optimizer, loss, **options) as engine:
        losses = [engine.step(micro_batches, weights) for micro_batches in steps]
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        assert torch.equal(torch.get_rng_state(), left_at)
    return engine


class Partial(nn.Module):
    """Has a parameter that takes no part, and one that only some micro-batches reach."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.randn(5))
        self.sometimes = nn.Parameter(torch.randn(width))

    def forward(self, value: Tensor) -> Tensor:
        out = self.used(value)
        return out * self.sometimes if value.shape[0] % 2 else out


def regression(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[1]).pow(2).mean()


def sequential_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return regression(model(batch[0]), batch)


def pairs(rows: Sequence[int], width: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, width), torch.randn(n, 3)) for n in rows]


class Skips(nn.Module):
    """A value read by three layers, and a side input read by two: cuts wider than one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.last = _Sum()

    def chain_layers(self) -> list[Layer]:
        return [
            Layer("a", self.a, ("x",), ("ha",)),
            Layer("b", self.b, ("ha",), ("hb",)),
            Layer("c", _Gate(self.c), ("hb", "ha", "side"), ("hc",)),
            Layer("d", _Gate(self.d), ("hc", "ha", "side"), ("hd",)),
            Layer("last", self.last, ("hd", "ha", "hb"), ("loss",)),
        ]

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        ha = self.a(x)
        hb = self.b(ha)
        hc = torch.tanh(self.c(hb) * ha) + side
        hd = torch.tanh(self.d(hc) * ha) + side
        return self.last(hd, ha, hb)


class _Gate(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, value: Tensor, gate: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.linear(value) * gate) + side


class _Sum(nn.Module):
    def forward(self, *values: Tensor) -> Tensor:
        return sum((v.pow(2).mean() for v in values), torch.zeros(()))


def deep_gpt(dropout: float, tied: bool) -> GPT:
    config = GPTConfig(
        layers=DEEP_LAYERS - 2, width=16, heads=2, head_width=8, vocabulary=101, context=19,
        dropout=dropout,
    )  # fmt: skip
    model = GPT(config)
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(101, 16) * 0.02)
    return model
