"""PyTorch's switch is on while an engine that asks for it is open, and as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis.head.pieces import linear_cross_entropy
from atomtrain.cli.train import arguments_of, options_of
from atomtrain.engine.devices.cuda import _FIXED_WORKSPACES, WORKSPACE
from atomtrain.engine.execution.determinism import deterministic, told_plainly
from atomtrain.errors import AtomError, ConfigError

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    assert state() == OFF
    yield
    gc.collect()
    assert state() == OFF, "somebody left it on"


def state() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


OFF, ON = (False, False, True), (True, False, False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def opened(*, wanted: bool = True, layers: list[str] | None = None) -> atomtrain.Engine:
    return atomtrain.swap(
        Model(), {"x": torch.ones(2, 4)}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        device="emulated", device_memory="16MiB", loss=lambda output: output, layers=layers,
        options=atomtrain.Options(deterministic=wanted),
    )  # fmt: skip


def test_it_is_on_until_the_engine_is_closed() -> None:
    with opened() as engine:
        assert state() == ON
        engine.step([{"x": torch.ones(2, 4)}])
        assert state() == ON
    assert state() == OFF
    engine.close()
    assert state() == OFF
    with opened(wanted=False):
        assert state() == OFF


def test_an_engine_that_is_forgotten_leaves_it_off() -> None:
    engine = opened()
    del engine
    gc.collect()
    assert state() == OFF


def test_engines_may_be_closed_in_any_order() -> None:
    first, second = opened(), opened()
    first.close()
    assert state() == ON
    second.close()
    assert state() == OFF


def test_an_engine_that_cannot_be_opened_leaves_it_off() -> None:
    with pytest.raises(AtomError):
        opened(layers=["nothing"])
    assert state() == OFF


def test_what_the_caller_had_is_there_again() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert state() == ON
        assert state() == (True, True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_has_no_deterministic_kind_is_told_in_one_line() -> None:
    """Of those operations few are on the processor; this is one."""
    with (
        deterministic(),
        pytest.raises(ConfigError, match=r"--deterministic: put_ .*; leave it out") as told,
        told_plainly(),
    ):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert "\n" not in str(told.value)
    with pytest.raises(RuntimeError, match="otherwise"), told_plainly():
        raise RuntimeError("otherwise")


def test_a_workspace_in_which_cublas_adds_in_any_order_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv(WORKSPACE, ":4096:2:16:8")
    with (
        pytest.raises(ConfigError, match="unset it, or set it to :4096:8 or :16:8"),
        deterministic(),
    ):
        pytest.fail("it was taken")
    assert _FIXED_WORKSPACES == (":4096:8", ":16:8")
    for fixed in _FIXED_WORKSPACES:
        monkeypatch.setenv(WORKSPACE, fixed)
        with deterministic():
            assert state() == ON
    monkeypatch.setenv(WORKSPACE, ":4096:2:16:8")
    monkeypatch.setattr("torch.version.hip", "7.0")
    with deterministic():
        pass  # AMD's library is told by PyTorch itself


def test_the_command_line_has_it() -> None:
    assert options_of(["--deterministic"]).deterministic
    assert "--deterministic" in arguments_of(options_of(["--deterministic"]))
    assert not options_of([]).deterministic


def test_the_loss_in_pieces_has_the_same_bits_with_it() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 8), torch.randn(11, 8)
    labels = torch.tensor([0, 10, 3, 3, -100, 5, 6])

    def gradients() -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = linear_cross_entropy(*inputs, None, labels, pieces=3)
        return [loss, *torch.autograd.grad(loss, inputs)]

    plain = gradients()
    with deterministic():
        same = gradients()
    assert all(map(torch.equal, plain, same))
