"""A device that fails ends the step on all devices, and nothing hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import DeviceMemoryError, StreamError

pytestmark = pytest.mark.usefixtures("assumed_times")
_RATE = 2**30


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def swap(devices: list[Any], **options: Any) -> atomtrain.Engine:
    return atomtrain.swap(
        model(), torch.randn(4, 8), optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3),
        device=devices, loss=squares, options=atomtrain.Options(micro_batches=4, **options),
    )  # fmt: skip


def train(engine: atomtrain.Engine, steps: list[list[torch.Tensor]]) -> None:
    for batches in steps:
        engine.step(batches)


def engine_threads() -> set[threading.Thread]:
    """Return the threads of engines; others come and go, such as those of earlier tests."""
    named = {t for t in threading.enumerate() if t.name.startswith("atom-")}
    return {t for t in named if not t.name.startswith("atom-swarm")}


class Failing:
    """Fails one stream's jobs from a moment on."""

    def __init__(self, stream: str) -> None:
        self.stream, self.now = stream, False

    def __call__(self, stream: str) -> None:
        if self.now and stream == self.stream:
            raise OSError("the link broke")


@pytest.mark.parametrize("stream", ["load", "fetch", "unload", "compute"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_device_that_fails_ends_the_step_on_all(stream: str, number: int) -> None:
    failing = Failing(stream)
    budget = 4 << 10
    devices = [EmulatedDevice(budget, _RATE, failing if n == number else None) for n in range(3)]
    batches = [torch.randn(4, 8) for _ in range(4)]
    threads = engine_threads()
    engine = swap(devices, segments=3, clip_norm=1.0)
    engine.step(batches)
    failing.now = True
    # What leaves in one step may be asked for in the next.
    with pytest.raises((StreamError, OSError), match="link broke"):
        train(engine, 3 * [batches])
    with pytest.raises(StreamError, match="resume from the last checkpoint"):
        engine.step(batches)
    failing.now = False
    engine.close()
    del engine
    assert engine_threads() <= threads


def test_too_large_a_micro_batch_on_one_device() -> None:
    engine = swap([EmulatedDevice(8 << 10, _RATE) for _ in range(2)])
    batches = [torch.randn(n, 8) for n in (4, 4, 4, 4000)]
    with pytest.raises(DeviceMemoryError, match="budget"):
        engine.step(batches)
    with pytest.raises(StreamError, match="failed earlier"):
        engine.evaluate(batches[:1])
    engine.close()


def test_a_callback_that_raises_ends_the_step() -> None:
    engine = swap(["emulated:1GiB/s"] * 2)

    def refuse(_: object) -> None:
        raise KeyboardInterrupt

    engine.on_segment = refuse
    with pytest.raises(KeyboardInterrupt):
        engine.step([torch.randn(4, 8) for _ in range(4)])
    engine.close()
