"""What a layer saves is watched once; what follows is the same, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis.costs.rematerialization import Rematerializer
from atomtrain.engine.execution.saved_script import ScriptError
from atomtrain.models import GPT, GPTConfig
from tests.support.swapped import pairs, regression

WIDTH = 12
OPTIONS = atomtrain.Options(
    micro_batches=2, segments=4, slots=2, activations="offload", host_layers=0,
    optimizer_on_device=False, profile=False,
)  # fmt: skip


def opened(network: nn.Module, example: Any, loss: Any = None) -> atomtrain.Engine:
    """Return an engine that offloads over so slow a link that what is cheap is made again."""
    return atomtrain.swap(
        network, example, optimizer=torch.optim.AdamW, loss=loss, device="emulated:1MB/s",
        device_memory="64MiB", options=OPTIONS,
    )  # fmt: skip


class Watched:
    """Counts the operations that are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        dispatch = Rematerializer.__torch_dispatch__

        def counted(mode: Rematerializer, *arguments: Any) -> Any:
            self.count += 1
            return dispatch(mode, *arguments)

        monkeypatch.setattr(Rematerializer, "__torch_dispatch__", counted)

    def in_step(self, engine: atomtrain.Engine, micro_batches: Any) -> int:
        before = self.count
        engine.step(micro_batches)
        return self.count - before


class Fickle(nn.Module):
    """Says that it does the same each time, and does not."""

    fixed_operations = True
    more = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.linear(value))
        return made.sigmoid() if Fickle.more else made


def test_layers_of_fixed_operations_are_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.arange(8).unsqueeze(0)
    batch = {"input_ids": tokens, "labels": tokens}
    sizes = GPTConfig(layers=3, width=16, heads=2, head_width=8, vocabulary=32, context=8)
    with opened(GPT(sizes), batch) as engine:
        assert engine.plan.remakes
        watched = Watched(monkeypatch)
        assert watched.in_step(engine, [batch] * 2) > 0
        assert watched.in_step(engine, [batch] * 2) == 0


def test_other_layers_are_watched_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
    batch = pairs([6, 6], WIDTH)
    with opened(network, batch[0], regression) as engine:
        watched = Watched(monkeypatch)
        assert watched.in_step(engine, batch) > 0
        assert watched.in_step(engine, batch) > 0


@pytest.mark.parametrize("more", [False, True])
def test_who_saves_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, more: bool) -> None:
    network = nn.Sequential(Fickle(), Fickle(), Fickle(), nn.Linear(WIDTH, 3))
    batch = pairs([6, 6], WIDTH)
    monkeypatch.setattr(Fickle, "more", not more)
    with opened(network, batch[0], regression) as engine:
        engine.step(batch)
        monkeypatch.setattr(Fickle, "more", more)
        with pytest.raises(ScriptError, match="a layer saved"):
            engine.step(batch)
