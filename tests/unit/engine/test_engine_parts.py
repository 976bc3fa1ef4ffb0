"""What an engine tells, gives back when it is closed, and refuses to take."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atomtrain.analysis.layers.trace import chain_of
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.state.store import HostStore
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.layout import Layout
from tests.support.engine_models import mlp, square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.ones(2, 8)


def test_closing_gives_device_memory_and_gradients_back_at_once() -> None:
    gc.disable()  # nothing may hang on cycles
    try:
        model = mlp()
        engine = swap(model, X, loss=square, segments=3)
        engine.step([X])
        gradients = weakref.ref(engine._core.store.gradients.untyped_storage())
        engine.device.reset_peak()
        assert engine.device.peak_bytes() > 0
        engine.close()
        engine.device.reset_peak()
        assert engine.device.peak_bytes() == 0
        assert gradients() is None
    finally:
        gc.enable()


def test_state_can_be_read_and_written_after_closing() -> None:
    model = mlp()
    with swap(model, X, loss=square, optimizer_on_device=True) as engine:
        engine.step([X])
    values, moments = engine.state_dict(), engine.optimizer_state()
    assert torch.equal(values["0.weight"], model[0].weight)
    assert moments["0.weight"]["exp_avg"].shape == model[0].weight.shape
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})
    assert not model[0].weight.any()
    with pytest.raises(ConfigError, match="closed"):
        engine.step([X])


def test_an_engine_that_fails_to_close_is_closed_all_the_same() -> None:
    def fail(stream: str) -> None:
        if stream == "update":
            raise RuntimeError("no power")

    engine = swap(mlp(), X, loss=square, inject=fail)
    engine.step([X])
    with pytest.raises(Exception, match="no power"):
        engine.close()
    engine.close()
    engine.device.reset_peak()
    assert engine.device.peak_bytes() == 0


def test_an_engine_may_be_forgotten_while_another_model_is_traced() -> None:
    """What a finalizer raises ends a test."""
    engine = swap(mlp(), X, loss=square)
    released = engine._core._release
    with FakeTensorMode():
        del engine
        gc.collect()
    assert not released.alive


def test_each_segment_is_told() -> None:
    told: list[tuple[str, tuple[str, ...]]] = []
    with swap(mlp(), X, loss=square, segments=3) as engine:
        engine.on_segment = told.append
        engine.step([X])
        assert told[-1] == ("backward", ("0",))
        assert [phase for phase, _ in told].count("turn") == 1
        names = [name for phase, layers in told if phase != "forward" for name in layers]
        assert sorted(names) == ["0", "1", "2"]
        told.clear()
        engine.evaluate([X])
        assert {phase for phase, _ in told} == {"evaluate"}


@pytest.mark.parametrize(("key", "shape"), [("exp_avg", (8,)), ("momentum_buffer", (4, 8))])
def test_optimizer_state_of_another_shape_is_refused_whole(
    key: str, shape: tuple[int, ...]
) -> None:
    with swap(mlp(), X, loss=square) as engine:
        engine.step([X])
        before = engine.optimizer_state()["0.weight"]["exp_avg"].clone()
        good = {"exp_avg": torch.zeros(8, 8), "exp_avg_sq": torch.zeros(8, 8)}
        with pytest.raises(ConfigError, match="load the state of this very model"):
            engine.load_optimizer_state({"0.weight": good, "1.weight": {key: torch.zeros(shape)}})
        assert torch.equal(engine.optimizer_state()["0.weight"]["exp_avg"], before)


def test_there_are_zeros_between_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(mlp(), X, square).chain
    layout = Layout(chain)
    device = EmulatedDevice(1 << 20, 1e12)
    monkeypatch.setattr(
        device, "host_empty", lambda n_bytes: torch.full((n_bytes,), 255, dtype=torch.uint8)
    )
    try:
        store = HostStore(chain, layout, device)
        between = torch.ones(layout.total_bytes, dtype=torch.bool)
        for parameter in chain.parameters:
            start = layout.offsets[id(parameter)]
            between[start : start + parameter.nbytes] = False
        assert between.any()
        assert not store.parameters[between].any()
        assert all(p.isfinite().all() for p in chain.parameters)
    finally:
        device.close()
