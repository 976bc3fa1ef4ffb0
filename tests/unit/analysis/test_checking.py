"""Layers given by hand: called one after the other, checked against the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis import chain_of
from atomtrain.errors import AnalysisError, ConfigError
from tests.support.engine_models import adamw, square

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.randn(4, 6)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Gate(nn.Module):
    """Steered by data, which cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = self.linear(x) * gate
        return y if x.is_meta or type(x) is not Tensor or float(y.sum().detach()) > 0 else -y


class Net(nn.Module):
    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.embed, self.gate = Split(), Gate()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.gate(*self.embed(x)))) + self.more


LAYERS = ["embed", "gate", "norm", "head"]


def swap(model: nn.Module, layers: Any, segments: int | None = None) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        X,
        optimizer=adamw,
        device="emulated:1000GB/s",
        device_memory="64MiB",
        loss=square,
        layers=layers,
        options=atomtrain.Options(segments=segments),
    )


def test_modules_are_called_one_after_the_other() -> None:
    model = Net()
    chain = chain_of(model, X, square, LAYERS).chain
    assert [layer.name for layer in chain.layers] == LAYERS
    assert chain.layers[1].reads == ("embed.out0", "embed.out1")
    assert int(model.norm.num_batches_tracked) == 0, "comparing changes nothing"


def test_training_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(0)
    reference = Net()
    optimizer = adamw(reference.parameters())
    batches = [torch.randn(4, 6) for _ in range(3)]
    with swap(model, LAYERS, segments=4) as engine:
        for batch in batches:
            optimizer.zero_grad()
            loss = square(reference(batch))
            loss.backward()
            optimizer.step()
            assert engine.step([batch]) == float(loss.detach())
        state = engine.state_dict()
        assert all(torch.equal(state[name], v) for name, v in reference.state_dict().items())
        assert engine.step([batches[0][:2]]) > 0, "shapes may vary"


def test_a_module_may_occur_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    chain = chain_of(Twice(), X, square, ["a", "b", "a"]).chain
    assert [layer.name for layer in chain.layers] == ["a", "b", "a#2"]


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        (["embed", "gat"], ConfigError, r"no module 'gat'\. Did you mean 'gate'"),
        ([], ConfigError, "at least one module path"),
        ("embed", ConfigError, "must be a list"),
        (["embed", "norm"], AnalysisError, r"layer 'norm' cannot run on \[4, 6\], \[4, 6\]"),
        (["embed", "gate", "head"], AnalysisError, r"'norm\.weight' belongs to no layer"),
    ],
)
def test_lists_that_cannot_be_used(layers: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        swap(Net(), layers)


def test_a_forward_that_does_more_is_noticed() -> None:
    with pytest.raises(AnalysisError, match=r"given by hand compute a loss of .* does more than"):
        swap(Net(more=1.0), LAYERS)
    with torch.device("meta"):
        model = Net(more=1.0)
    assert len(chain_of(model, X, square, LAYERS).chain.layers) == 4, "nothing to compare with"
