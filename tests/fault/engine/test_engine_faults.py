"""Faults in every stream and in compute: a typed error, never a hang or half a model."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.errors import AtomError, ConfigError, DeviceMemoryError, StreamError
from tests.support.engine_models import gpt, mlp, square, swap, tokens

pytestmark = pytest.mark.usefixtures("assumed_times")
STREAMS = ["load", "fetch", "unload", "save", "update"]


class FaultError(Exception):
    """What the injector raises."""


class FailAt:
    """Raises in the `job`-th job of one stream, once."""

    def __init__(self, stream: str, job: int) -> None:
        self.stream, self.left, self.raised = stream, job, False

    def __call__(self, stream: str) -> None:
        if stream != self.stream:
            return
        self.left -= 1
        if self.left == -1:
            self.raised = True
            raise FaultError(f"injected in {stream}")


def engine_threads() -> set[threading.Thread]:
    """Return the threads of engines; others come and go, such as those of earlier tests."""
    named = {t for t in threading.enumerate() if t.name.startswith("atom-")}
    return {t for t in named if not t.name.startswith("atom-swarm")}


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = engine_threads()
    yield
    gc.collect()
    assert engine_threads() <= before


def train(engine: atomtrain.Engine, micro_batches: list[Any], steps: int) -> None:
    for _ in range(steps):
        engine.step(micro_batches)
    engine.synchronize()


def check_refusals(engine: atomtrain.Engine, example: Any) -> None:
    """Every later call fails clearly, and closing still returns."""
    calls: list[Callable[[], Any]] = [
        lambda: engine.step([example]),
        lambda: engine.evaluate([example]),
        engine.synchronize,
        engine.state_dict,
        engine.optimizer_state,
        lambda: engine.load_state_dict({}),
        lambda: engine.fragment(0, 256).__enter__(),
    ]
    for call in calls:
        with pytest.raises(StreamError, match=r"failed earlier .* resume from the last checkpoint"):
            call()
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="engine is closed"):
        engine.step([example])


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_failed_job_ends_in_a_typed_error_and_nothing_goes_on(
    stream: str, clip_norm: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", ("host",))
    fault = FailAt(stream, random.Random(f"{stream} {seed}").randrange(12))
    model, example = gpt(2, dropout=0.1), tokens(1, 4)
    # Values wait on the host and are needed again: every stream has jobs.
    options = {"segments": 4, "micro_batches": 2, "activations": "recompute"}
    engine = swap(model, example, clip_norm=clip_norm, inject=fault, **options)
    with pytest.raises(StreamError, match=f"injected in {stream}") as caught:
        train(engine, [example, example], steps=10)
    assert fault.raised
    assert isinstance(caught.value.__cause__, FaultError)
    check_refusals(engine, example)


@pytest.mark.parametrize("stream", ["load", "fetch", "save"])
def test_a_failed_job_in_evaluation(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", ("host",))
    fault = FailAt(stream, 2)
    example = tokens()
    engine = swap(gpt(3), example, segments=5, micro_batches=2, inject=fault)
    with pytest.raises(StreamError, match=f"injected in {stream}"):
        engine.evaluate([example] * 2)
    assert engine.model.training, "the mode is as before"
    check_refusals(engine, example)


def test_an_update_that_fails_after_the_last_step_shows_at_the_end() -> None:
    for finish in (lambda e: e.synchronize(), lambda e: e.close(), lambda e: e.wait()):
        fault = FailAt("update", 0)
        engine = swap(mlp(), torch.ones(2, 8), loss=square, segments=3, inject=fault)
        engine.step([torch.ones(2, 8)])
        with pytest.raises(StreamError, match="injected in update"):
            finish(engine)
        engine.close()


def test_a_fault_in_compute_keeps_its_type_and_ends_the_engine() -> None:
    fault = FailAt("compute", 7)
    example = tokens()
    engine = swap(gpt(3), example, segments=5, inject=fault)
    with pytest.raises(FaultError):
        engine.step([example])
    check_refusals(engine, example)


class Hungry(nn.Module):
    """Takes an extra piece of device memory when told, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.forward_floats = self.backward_floats = 0

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(self.forward_floats)
        out = x * self.weight
        if self.backward_floats and out.requires_grad:
            out.register_hook(lambda gradient: gradient + torch.empty(self.backward_floats).sum())
        return out


@pytest.mark.parametrize("where", ["forward_floats", "backward_floats"])
@pytest.mark.parametrize("segments", [1, 3])
def test_memory_beyond_the_budget_is_refused_in_forward_and_backward(
    where: str, segments: int
) -> None:
    hungry = Hungry()
    model, example = nn.Sequential(nn.Linear(8, 8), hungry, nn.Linear(8, 8)), torch.ones(4, 8)
    engine = swap(model, example, loss=square, memory="1MiB", segments=segments)
    engine.step([example])
    setattr(hungry, where, 1 << 20)
    with pytest.raises(DeviceMemoryError, match=r"budget of 1.0 MiB is exceeded: .* 4.0 MiB"):
        engine.step([example])
    check_refusals(engine, example)


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_micro_batch_larger_than_the_example_is_refused_by_the_budget(call: str) -> None:
    example, large = tokens(2, 16), tokens(900, 32)
    engine = swap(gpt(2), example, memory="1MiB", segments=4)
    engine.step([example])
    with pytest.raises(DeviceMemoryError, match="use smaller micro-batches"):
        getattr(engine, call)([large])
    check_refusals(engine, example)


def test_more_micro_batches_than_fit_leave_the_engine_as_it_was() -> None:
    example = tokens(2, 16)
    engine = swap(gpt(2), example, memory="100KiB")
    first = engine.step([example])
    with pytest.raises(AtomError):
        engine.step([{"input_ids": example["input_ids"]}])
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        engine.step([])
    assert engine.step([example]) < first, "a refused call does no harm"
    engine.close()


def test_an_error_of_the_model_itself_keeps_its_type() -> None:
    example = tokens(2, 16)
    engine = swap(gpt(2), example, segments=4)
    with pytest.raises(ConfigError, match="longer than the model's context"):
        engine.step([tokens(1, 33)])
    check_refusals(engine, example)


def test_slots_that_do_not_fit_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> None:
        raise DeviceMemoryError("no room for the slots")

    monkeypatch.setattr("atomtrain.engine.execution.executor.Slots", too_large)
    before = engine_threads()
    with pytest.raises(DeviceMemoryError, match="no room"):
        swap(gpt(1), tokens())
    assert engine_threads() == before


@pytest.mark.parametrize("how", ["close", "with", "forgotten", "forgotten after a failure"])
def test_no_thread_survives_its_engine(how: str) -> None:
    before = engine_threads()
    example = torch.ones(2, 8)
    fault = FailAt("load", 4 if how.endswith("failure") else 10**9)
    engine = swap(mlp(), example, loss=square, segments=3, inject=fault)
    assert len(engine_threads() - before) == 5
    if how.endswith("failure"):
        with pytest.raises(StreamError):
            train(engine, [example], steps=3)
    else:
        engine.step([example])
    if how == "close":
        engine.close()
    elif how == "with":
        with engine:
            pass
    del engine
    gc.collect()
    assert engine_threads() == before


def test_random_faults_never_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", ("host",))
    source = random.Random(7)
    example = tokens(1, 4)
    for _ in range(6):
        fault = FailAt(source.choice([*STREAMS, "compute"]), source.randrange(12))
        options: dict[str, Any] = {
            "segments": source.randint(3, 4),
            "slots": source.randint(1, 3),
            "clip_norm": source.choice([None, 1.0]),
            "micro_batches": 2,
            "activations": "recompute",  # every stream has jobs
        }
        engine = swap(gpt(2), example, inject=fault, **options)
        with pytest.raises((StreamError, FaultError)):
            train(engine, [example] * 2, steps=15)
        check_refusals(engine, example)
