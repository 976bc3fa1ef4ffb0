"""Optimizers are measured by themselves, once, and nothing of the caller's is touched."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import Chain, chain_of
from atomtrain.engine.calibration import probes, update_rates
from atomtrain.engine.calibration.update_rates import Kind, measured_updates
from atomtrain.engine.updates.optimizer import update_model
from atomtrain.optimizers import AdamW, Muon, muon_groups
from atomtrain.planning.plan.updating import UpdateModel

pytestmark = pytest.mark.slow

KEY = {"device": "x"}
HELD_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (update_rates, probes):
        monkeypatch.setattr(module, "uncached_bytes", lambda *_: HELD_BYTES)
    monkeypatch.setattr(update_rates, "_MOST_FLOPS", 1e4)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Replace measurements by 3; the list says what was measured."""
    log: list[Kind] = []

    def measured(_: Any, kind: Kind, __: Any) -> float:
        log.append(kind)
        return 3.0

    monkeypatch.setattr(update_rates, "_measured", measured)
    return log


def layers() -> tuple[nn.Sequential, Chain]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    return model, chain_of(model, torch.ones(2, 8), torch.sum).chain


def rated(
    optimizer: torch.optim.Optimizer,
    chain: Chain,
    folder: Path,
    *,
    one_processor: bool = True,
    clips: bool = False,
) -> tuple[UpdateModel, UpdateModel]:
    model = update_model(optimizer, chain)
    taken = measured_updates(
        model, optimizer, chain, KEY, one_processor=one_processor, clips=clips, folder=folder
    )
    return model, taken


def test_a_real_measurement_leaves_no_trace(tmp_path: Path) -> None:
    model, chain = layers()
    optimizer = AdamW(model.parameters(), state="int8")
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    estimated, taken = rated(optimizer, chain, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert not called
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, one in taken.parameters.items():
        assert one.host_work > 0
        assert one.device_work == one.host_work
        assert one.state_bytes == estimated.parameters[key].state_bytes


def test_what_was_measured_is_not_measured_again(tmp_path: Path, shares: list[Kind]) -> None:
    model, chain = layers()
    _, taken = rated(AdamW(model.parameters(), lr=1e-3), chain, tmp_path)
    assert len(shares) == 2  # matrices, and what has one dimension
    for parameter in model.parameters():
        assert taken.parameters[id(parameter)].host_work == pytest.approx(3.0 * parameter.numel())
    rated(AdamW(model.parameters(), lr=3e-4, betas=(0.8, 0.9), seed=7), chain, tmp_path)
    assert len(shares) == 2
    rated(AdamW(model.parameters(), state="bfloat16"), chain, tmp_path)
    rated(AdamW(model.parameters(), weight_decay=0.0), chain, tmp_path)
    assert len(shares) == 6


def test_clipped_updates_are_measured_by_themselves(tmp_path: Path, shares: list[Kind]) -> None:
    """The unit too: torch's fused AdamW needs a pass over its gradients first."""
    model, chain = layers()
    for optimizer in (AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), fused=True)):
        shares.clear()
        for clips in (False, True, True):
            rated(optimizer, chain, tmp_path, clips=clips)
        assert [kind.clips for kind in shares] == [False, False, True, True]
    assert [update_rates._is_the_unit(kind) for kind in shares] == [True, True, False, False]


@pytest.mark.parametrize("kind", ["own", "torch"])
def test_a_clipped_probe_multiplies_its_gradient(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chain = layers()
    make = AdamW if kind == "own" else torch.optim.AdamW
    optimizer = make(model.parameters())
    seen: list[Any] = []
    step = make.step

    def stepped(self: Any, closure: Any = None) -> Any:
        (probe,) = self.param_groups[0]["params"]
        seen.append((getattr(self, "clip_coefficient", None), probe.grad.clone()))
        return step(self, closure)

    monkeypatch.setattr(make, "step", stepped)
    found, _ = update_rates._kind_of(
        optimizer, optimizer.param_groups[0], model[0].weight, chain.gradient_factor, clips=True
    )
    update = update_rates._step(optimizer, found)
    update()
    update()
    (coefficient, first), (_, second) = seen
    if kind == "own":
        assert float(coefficient) == update_rates._COEFFICIENT
    else:
        assert torch.equal(second, first * update_rates._COEFFICIENT)


def test_probes_of_narrow_formats_are_larger() -> None:
    """Each goes through as many bytes: of fewer a cache would hold a part."""
    model, _ = layers()
    half, _ = layers()
    half.bfloat16()
    for owned, state, master, held in (
        (model, "float32", "float32", 16),
        (model, "bfloat16", "float32", 12),
        (half, "int8", "split", 2 + 2 + 2 + 2 * (1 + 4 / 128)),
    ):
        weight = owned[0].weight
        optimizer = AdamW([weight], state=state, master=master)
        found, probes_taken = update_rates._kind_of(
            optimizer, optimizer.param_groups[0], weight, 1, clips=False
        )
        count = math.prod(found.shape)
        assert HELD_BYTES <= count * held < HELD_BYTES + 1024 * held + 1
        assert probes_taken == weight.numel() / count


def test_a_gpu_s_time_stays_an_estimate(tmp_path: Path, shares: list[Kind]) -> None:
    model, chain = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    estimated, taken = rated(optimizer, chain, tmp_path, one_processor=False)
    assert shares
    for key, one in taken.parameters.items():
        assert one.device_work == estimated.parameters[key].device_work
        assert one.host_work != estimated.parameters[key].host_work


def test_the_unit_needs_no_measurement(tmp_path: Path) -> None:
    model, chain = layers()
    _, taken = rated(torch.optim.AdamW(model.parameters(), fused=True), chain, tmp_path)
    for parameter in model.parameters():
        assert taken.parameters[id(parameter)].host_work == parameter.numel()


def test_large_matrices_are_measured_small_and_count_by_their_products(
    tmp_path: Path, shares: list[Kind]
) -> None:
    model, chain = layers()
    optimizer = Muon(muon_groups(model, 0.1), lr=1e-3)
    matrix = model[0].weight
    flops = optimizer.flops_of(matrix)
    assert flops > 1e4
    _, taken = rated(optimizer, chain, tmp_path)
    (kind, *_) = [kind for kind in shares if kind.flops]
    assert kind.flops == pytest.approx(1e4, rel=0.01)
    ratio = kind.shape[0] / kind.shape[1]
    assert ratio == pytest.approx(matrix.shape[0] / matrix.shape[1], rel=0.3)
    expected = 3.0 * math.prod(kind.shape) * flops / 1e4
    assert taken.parameters[id(matrix)].host_work == pytest.approx(expected, rel=0.01)


def test_a_foreign_optimizer_that_fails_on_a_probe_is_estimated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnOnly(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("not one of mine")

    model, chain = layers()
    with caplog.at_level(logging.WARNING):
        estimated, taken = rated(OwnOnly(model.parameters(), lr=0.1), chain, tmp_path)
    assert "updates by OwnOnly cannot be measured" in caplog.text
    assert taken.parameters == estimated.parameters


def test_wide_gradients_and_masters_are_measured_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe has the parameters' own type, the gradients' width and the master's halves."""
    model, chain = layers()
    model.bfloat16()
    optimizer = AdamW(model.parameters(), master="split")
    probes: list[nn.Parameter] = []
    states: list[dict[str, Any]] = []
    step = AdamW.step

    def seen(self: AdamW, closure: Any = None) -> Any:
        result = step(self, closure)
        (probe,) = self.param_groups[0]["params"]
        probes.append(probe)
        states.append(self.state[probe])
        return result

    monkeypatch.setattr(AdamW, "step", seen)
    wide = chain_of(model, torch.ones(2, 8, dtype=torch.bfloat16), torch.sum).chain
    for of in (chain, dataclasses.replace(wide, gradient_factor=2)):
        probes.clear()
        states.clear()
        _, taken = rated(optimizer, of, tmp_path)
        assert all(one.host_work > 0 for one in taken.parameters.values())
        assert {probe.dtype for probe in probes} == {torch.bfloat16}
        expected = torch.bfloat16 if of is chain else torch.float32
        assert {None if probe.grad is None else probe.grad.dtype for probe in probes} == {expected}
        assert {state["rest"].dtype for state in states} == {torch.int16}
