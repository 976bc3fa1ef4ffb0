"""The engine with `precision="bf16"`: fragments, mistakes, frozen parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.errors import ConfigError, PlanError
from atomtrain.native import library
from atomtrain.optimizers import AdamW

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
MASTERS = ["float32", "split"]


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 9))


def swap(model: nn.Module, master: str = "float32", **changes: Any) -> atomtrain.Engine:
    given: dict[str, Any] = {
        "optimizer": lambda parameters: AdamW(parameters, lr=1e-2, master=master),
        "loss": lambda output: output.square().mean(),
        "device": "emulated:1GiB/s",
        "device_memory": "64MiB",
        **changes,
    }
    options = atomtrain.Options(
        precision="bf16", profile=False, segments=2, optimizer_on_device=False
    )
    return atomtrain.swap(model, X, options=options, **given)


def clones(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("master", MASTERS)
def test_a_fragment_is_the_masters_and_goes_back_exactly(master: str) -> None:
    with swap(mlp(), master) as engine:
        engine.step([X])
        before = clones(engine.state_dict())
        for start, stop in engine.fragment_ranges():
            with engine.fragment(start, stop) as values:
                assert values.dtype is torch.float32
                assert values.numel() == (stop - start) // engine.element_bytes
        after = clones(engine.state_dict())
        for name, value in before.items():
            assert torch.equal(after[name], value), name
        for start, stop in engine.fragment_ranges():
            with engine.fragment(start, stop) as values:
                values.add_(1e-4)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name] + 1e-4), name
            stream = engine.model.get_parameter(name)
            assert stream.dtype is torch.bfloat16
            assert torch.equal(stream, value.bfloat16()), name


@pytest.mark.parametrize("master", MASTERS)
def test_what_a_fragment_changed_is_what_the_next_step_uses(master: str) -> None:
    losses = []
    for in_fragments in (True, False):
        with swap(mlp(), master) as engine:
            engine.step([X])
            if in_fragments:
                for start, stop in engine.fragment_ranges():
                    with engine.fragment(start, stop) as values:
                        values.mul_(1.25)
            else:
                state = {name: value * 1.25 for name, value in engine.state_dict().items()}
                engine.load_state_dict(state)
            losses.append([engine.step([X]) for _ in range(2)])
    assert losses[0] == losses[1]


def test_the_first_masters_are_the_models_own_values() -> None:
    model = mlp()
    before = clones(model.state_dict())
    with swap(model, "split") as engine:
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_frozen_parameters_and_tables_keep_what_they_are() -> None:
    class Rotated(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("table", torch.rand(16), persistent=False)
            self.register_buffer("shift", torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.table).to(x.dtype) + self.shift

    model = nn.Sequential(Rotated(), nn.Linear(16, 9))
    model[0].bias.requires_grad_(False)
    frozen, table = model[0].bias.detach().clone(), model[0].table.clone()
    with swap(model) as engine:
        engine.step([X])
        assert torch.equal(engine.state_dict()["0.bias"], frozen.bfloat16())
        assert torch.equal(model[0].table, table)
        assert model[0].shift.dtype is torch.bfloat16


def test_an_optimizer_without_masters_is_refused_and_the_model_is_as_before() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="needs an optimizer that keeps float32 masters, SGD"):
        swap(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(PlanError):
        swap(model, device_memory="1KiB")
    for name, value in model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, before[name]), name


def test_types_that_cannot_be_narrowed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0.weight' is torch.float64; convert the model"):
        swap(mlp().double())
    with pytest.raises(ConfigError, match="precision must be 'bf16' or 'fp16', or None"):
        atomtrain.Options(precision="fp8")  # type: ignore[arg-type]


def test_a_model_of_mixed_types_has_no_fragments() -> None:
    model = mlp()
    model[0].register_parameter("narrow", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    with (
        atomtrain.swap(
            model,
            X,
            optimizer=torch.optim.SGD,
            loss=lambda output: output.square().mean(),
            device="emulated:1GiB/s",
            device_memory="64MiB",
            options=atomtrain.Options(profile=False),
        ) as engine,
        pytest.raises(ConfigError, match="the model mixes"),
    ):
        _ = engine.element_bytes


@pytest.mark.parametrize(
    ("master", "state", "each_bytes"),
    [
        ("float32", "float32", 12), ("split", "float32", 10), ("float32", "bfloat16", 8),
        ("split", "bfloat16", 6),
    ],
)  # fmt: skip
def test_the_plan_counts_masters_and_moments(master: str, state: str, each_bytes: int) -> None:
    with swap(mlp(), optimizer=lambda given: AdamW(given, state=state, master=master)) as engine:
        arena_bytes = 2 * engine._core.store.layout.total_bytes
        assert engine.state_bytes == arena_bytes + each_bytes * engine.parameters
        wide = swap(mlp(), optimizer=lambda given: AdamW(given, state="float32"))
        difference = (12 - each_bytes) * engine.parameters
        if library.core() is None:  # PyTorch's way takes scratch
            difference += 4 * 24 * 16 * (1 - {12: 1, 10: 2, 8: 3, 6: 4}[each_bytes])
        assert wide.plan.host_bytes - engine.plan.host_bytes == difference
        wide.close()
