"""Small models and engines that the tests of the engine's parts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis import Chain, LayerTime
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.engine.devices.streams import Inject
from atomtrain.models import GPT, GPTConfig
from tests.support.injecting import device_with


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def swap(
    model: nn.Module,
    example: Any,
    *,
    memory: str | int = "64MiB",
    optimizer: Any = adamw,
    loss: Any = None,
    inject: Inject | None = None,
    **options: Any,
) -> atomtrain.Engine:
    """Swap a model on an emulated device whose link costs no time."""
    return atomtrain.swap(
        model,
        example,
        optimizer=optimizer,
        device=device_with(inject, "emulated:1000GB/s", memory),
        device_memory=memory,
        loss=loss,
        options=atomtrain.Options(**{"optimizer_on_device": False, **options}),
    )


def assumed_times(chain: Chain, costs: ChainCosts, *_: Any) -> dict[str, LayerTime]:
    """Return times at 10 GFLOP/s and 1 us a layer."""
    return {
        cost.kind: LayerTime(
            1e-6 + cost.forward_flops / 1e10,
            1e-6 + (cost.forward_flops + cost.backward_flops) / 1e10,
        )
        for cost in costs.layers
    }


def gpt(layers: int = 2, width: int = 16, dropout: float = 0.0, vocabulary: int = 61) -> GPT:
    config = GPTConfig(
        layers=layers, width=width, heads=2, head_width=8, vocabulary=vocabulary, context=32,
        dropout=dropout,
    )  # fmt: skip
    return GPT(config)


def tokens(sequences: int = 2, length: int = 16, vocabulary: int = 61) -> dict[str, Tensor]:
    drawn = torch.randint(vocabulary, (sequences, length + 1))
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def mlp(layers: int = 3, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def square(output: Tensor) -> Tensor:
    """A loss of one argument."""
    return output.pow(2).mean()


def regression(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    """A loss of two arguments."""
    return (output - batch[1]).pow(2).mean()
