"""Values, gradients and inputs that lie in memory in an unusual way are handed on as they lie.

They are expanded, parts of larger tensors, or begin anywhere in memory: kernels add in another
order then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Layer
from atomtrain.engine.state.residents import DeviceBuffers
from tests.support.planning_models import random_shape, use_shape
from tests.support.swapped import check

pytestmark = pytest.mark.usefixtures("assumed_times")


class _Part(nn.Module):
    """A part of each row, which does not begin where memory is aligned."""

    def forward(self, value: Tensor) -> Tensor:
        return value.tanh()[..., 10:18]


class _Joined(nn.Module):
    """The gradients of what it joins are parts of one that is larger."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second], -1)


class _Mean(nn.Module):
    """The gradient of its second input is expanded."""

    def forward(self, value: Tensor, other: Tensor) -> Tensor:
        return value.mean(1) + other.sum((1, 2))[:, None]


class _Sum(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.sum()


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 300), nn.Linear(8, 9)
        self.c, self.d, self.e = nn.Linear(9, 2), nn.Linear(10, 9), nn.Linear(9, 5)
        self.part, self.joined, self.mean, self.last = _Part(), _Joined(), _Mean(), _Sum()

    def chain_layers(self) -> list[Layer]:
        return [
            Layer("a", self.a, ("x",), ("wide",)),
            Layer("part", self.part, ("wide",), ("narrow",)),
            Layer("b", self.b, ("narrow",), ("hb",)),
            Layer("c", self.c, ("hb",), ("hc",)),
            Layer("joined", self.joined, ("hc", "narrow"), ("both",)),
            Layer("d", self.d, ("both",), ("hd",)),
            Layer("mean", self.mean, ("hd", "narrow"), ("pooled",)),
            Layer("e", self.e, ("pooled",), ("he",)),
            Layer("last", self.last, ("he",), ("loss",)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.part(self.a(x))
        joined = self.joined(self.c(self.b(narrow)), narrow)
        loss: Tensor = self.last(self.e(self.mean(self.d(joined), narrow)))
        return loss


class Joins(nn.Module):
    """The gradient of a narrow value lies in that of a wide one, and layers below hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.wide, self.d = nn.Linear(8, 400), nn.Linear(408, 1)
        self.joined, self.last = _Joined(), _Sum()

    def chain_layers(self) -> list[Layer]:
        return [
            Layer("a", self.a, ("x",), ("ha",)),
            Layer("b", self.b, ("ha",), ("hb",)),
            Layer("c", self.c, ("hb",), ("hc",)),
            Layer("wide", self.wide, ("x",), ("hw",)),
            Layer("joined", self.joined, ("hc", "hw"), ("both",)),
            Layer("d", self.d, ("both",), ("hd",)),
            Layer("last", self.last, ("hd",), ("loss",)),
        ]

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.c(self.b(self.a(x)))
        loss: Tensor = self.last(self.d(self.joined(narrow, self.wide(x))))
        return loss


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return {"loss": x.sum()}


@pytest.mark.parametrize("activations", ["offload", "keep", "recompute"])
def test_inputs_of_one_shape_lie_otherwise_in_each_micro_batch(activations: Any) -> None:
    """What the first one had its layers save, and where it lay, does not hold for the next.

    A part of wider rows comes to a device without what lies between them, as `Tensor.to` brings
    it. Some processors add in another order where rows do not begin at a multiple of 16 bytes, so
    the resident model is given such a part as a device would have it.
    """
    ways: list[Callable[[], Tensor]] = [
        lambda: torch.randn(6, 8),
        lambda: torch.randn(8, 6).t(),
        lambda: torch.randn(6, 20)[:, 3:11],
        lambda: torch.randn(1, 8).expand(6, 8),
        lambda: torch.randn(9, 8)[3:],
    ]
    steps = [[{"x": ways[index]()} for index in step] for step in ([0], [1, 0], [2, 3], [4, 1])]

    def resident_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        loss: Tensor = model(x.contiguous() if x.stride() == (20, 1) else x)["loss"]
        return loss

    check(
        Exported(), steps, loss_of=resident_loss,
        activations=activations, micro_batches=2, segments=3, slots=2, host_layers=0,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_strides(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    torch.manual_seed(seed)
    use_shape(monkeypatch, random_shape(random.Random(seed), 9, 5))
    rows = [torch.randn(7, 37, 8) for _ in range(2)]
    # Inputs that begin in the middle of memory, and expanded ones.
    steps = [
        [{"x": x[1 + index : 4 + index]} for index in range(1 + seed % 3)]
        + [{"x": x[:1].expand(3, 37, 8)}]
        for x in rows
    ]
    check(Strided(), steps, loss_of=lambda model, batch: model(**batch))


@pytest.mark.parametrize("seed", range(20))
def test_gradients_that_lie_in_larger_ones(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    torch.manual_seed(seed)
    use_shape(monkeypatch, random_shape(random.Random(seed), 7, 5))
    steps = [[{"x": torch.randn(64, 8)} for _ in range(1 + seed % 3)] for _ in range(2)]
    check(Joins(), steps, loss_of=lambda model, batch: model(**batch))


class Turned(nn.Module):
    """Turns pairs of numbers by tables that lie column by column, as DeepSeek-V2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        angles = torch.randn(4, 13)
        self.register_buffer("kept", torch.polar(torch.ones(4, 13), angles).t(), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        angles = torch.arange(4.0, device=x.device)[:, None] * torch.arange(13.0, device=x.device)
        made = torch.polar(torch.ones_like(angles), angles).transpose(0, 1)
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (4, 2)))
            x = torch.view_as_real(pairs * made * self.kept).flatten(-2)
        return {"loss": x.sin().sum()}


@pytest.mark.parametrize("activations", ["offload", "keep", "recompute"])
def test_tables_lie_on_the_device_as_they_lie_in_the_model(
    activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers in another layout are multiplied by other instructions."""
    torch.manual_seed(0)
    model, seen = Turned(), list[tuple[int, ...]]()
    of = DeviceBuffers.of

    def watched(self: DeviceBuffers, *given: Any, **named: Any) -> dict[str, Tensor]:
        buffers = of(self, *given, **named)
        seen.extend(buffer.stride() for buffer in buffers.values())
        return buffers

    monkeypatch.setattr(DeviceBuffers, "of", watched)
    steps = [[{"x": torch.randn(2, 13, 8)} for _ in range(2)] for _ in range(2)]
    check(
        model, steps, loss_of=lambda model, batch: model(**batch)["loss"],
        activations=activations, micro_batches=2, segments=3, slots=2, host_layers=0,
    )  # fmt: skip
    assert set(seen) == {(1, 13), (13, 1)}  # the buffer, and the base of what forward turns
