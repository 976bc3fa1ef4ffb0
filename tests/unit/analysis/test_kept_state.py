"""Layers that run by their own code may change buffers in place, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import AnalysisError
from tests.support.engine_models import square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.ones(2, 4)


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.seen: list[int] = []
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))


class Counts(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Lists(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x) * len(self.seen)


class Remembers(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        given = y if self.last is None else y + self.last
        self.last = y.detach()
        return given


class Puts(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


class OwnNoise(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(OwnNoise(), nn.Linear(4, 4)), "a torch.Generator of its own, whose state"),
        (OwnNoise(), "cannot be traced, such as a torch.Generator of its own"),
    ],
)
def test_random_numbers_that_nobody_can_draw_again(model: nn.Module, message: str) -> None:
    with pytest.raises(AnalysisError, match=message) as caught:
        swap(model, X, loss=square)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Clamps(4, 4), "changes the parameter 'weight' in place"),
        (nn.Embedding(4, 4, max_norm=0.5), "changes the parameter 'weight' in place"),
        (Counts(), "changes the attribute 'calls'"),
        (Lists(), "changes the attribute 'seen'"),
        (Remembers(), "changes the attribute 'last'"),
        (Puts(), "in the place of the buffer 'mean'"),
    ],
)
def test_what_would_be_lost_is_refused(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(layer, nn.Linear(4, 4))
    example = X.long() if isinstance(layer, nn.Embedding) else X
    with pytest.raises(AnalysisError, match=f"layer '0': forward .*{message}") as caught:
        swap(model, example, loss=square)
    assert "\n" not in str(caught.value)
