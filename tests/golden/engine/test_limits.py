"""A model whose forward holds its parameters within limits is trained like in an ordinary loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import chain_of
from atomtrain.errors import AnalysisError
from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin

pytestmark = pytest.mark.usefixtures("assumed_times")
WIDTH = 8
X = {"x": torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)}


class Held(nn.Module):
    """Its weights are clamped by one of several ways of writing it."""

    def __init__(self, way: str = "data") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = self.before(layer, x)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return {"loss": x.float().pow(2).mean()}

    def before(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.way == "data" or (self.way == "in training" and self.training):
            layer.weight.data.clamp_(-0.1, 0.2)
        elif self.way == "no gradient":
            with torch.no_grad():
                layer.weight.clamp_(max=0.1)
                layer.bias.clamp_(min=0.05)
        elif self.way == "read before":
            x = x * layer.weight.sum()
            layer.weight.data.clamp_(-0.1, 0.2)
        elif self.way == "used":
            x = x * layer.weight.data.clamp_(-0.1, 0.2).sum()
        elif self.way == "by data":
            layer.weight.data.clamp_(-x.abs().max(), x.abs().max())
        return x


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=3.0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("memory", ["64MiB", "5KiB"])
@pytest.mark.parametrize("way", ["data", "no gradient", "used"])
@pytest.mark.parametrize("on_device", [False, True])
def test_swapped_is_resident(way: str, memory: str, micro_batches: int, on_device: bool) -> None:
    torch.manual_seed(0)
    model = Held(way)
    reference = twin(model)
    resident = sgd(reference.parameters())
    steps = [[X] * micro_batches] * 4
    with swap(
        model, X, memory=memory, optimizer=sgd, micro_batches=micro_batches,
        optimizer_on_device=on_device,
    ) as engine:  # fmt: skip
        expected, bitten = [], 0
        for step in steps:
            before = [p.clone() for p in reference.parameters()]
            reference(**X)  # which holds them, as the step's first forward does
            pairs = zip(before, reference.parameters(), strict=True)
            bitten += any(not torch.equal(old, new) for old, new in pairs)
            with torch.no_grad():
                for old, new in zip(before, reference.parameters(), strict=True):
                    new.copy_(old)
            expected += train(reference, [step], resident, lambda own, batch: own(**batch)["loss"])
            assert engine.step(step) == expected[-1]
        engine.synchronize()
        assert_equal_training(engine, reference, resident)
    assert bitten > 1, "parameters leave the limits again and again"


@pytest.mark.parametrize("way", ["read before", "by data"])
def test_others_are_refused_with_their_line(way: str) -> None:
    with pytest.raises(AnalysisError, match=r"changes a parameter in place at .*test_limits\.py"):
        chain_of(Held(way), X)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("way", ["data", "in training"])
def test_evaluation_holds_what_the_model_does_then(way: str, mode: bool) -> None:
    torch.manual_seed(0)
    model = Held(way)
    reference = twin(model)
    resident = sgd(reference.parameters())
    with swap(model, X, optimizer=sgd, micro_batches=1) as engine:
        for _ in range(3):
            expected = train(reference, [[X]], resident, lambda own, batch: own(**batch)["loss"])
            assert [engine.step([X])] == expected
            model.train(mode)  # evaluation takes the model out of training anyway
            reference.eval()
            with torch.no_grad():
                assert engine.evaluate([X]) == float(reference(**X)["loss"])
            model.train()
            reference.train()
        engine.synchronize()
        assert_equal_training(engine, reference, resident)


def test_masters_are_held() -> None:
    """In 16 bits, too, what a run goes on with is within the limits."""
    from atomtrain.optimizers import AdamW

    model = Held()
    with swap(
        model, X, optimizer=lambda p: AdamW(p, lr=0.5), precision="bf16", micro_batches=1
    ) as engine:
        for _ in range(2):
            engine.step([X])
        engine.synchronize()
        outside = [engine.masters.read(layer.weight).abs().max() > 0.25 for layer in model.layers]
        assert any(outside)
        engine.evaluate([X])
        engine.synchronize()
        for layer in model.layers:
            assert engine.masters.read(layer.weight).max() <= 0.2
            assert engine.masters.read(layer.weight).min() >= -0.1
