"""Optimizers are measured by themselves, once, and nothing of the caller's is touched."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import Chain, chain_of
from atomtrain.engine.calibration import update_rates
from atomtrain.engine.calibration.update_rates import Kind, measured_updates
from atomtrain.engine.updates.optimizer import update_model
from atomtrain.optimizers import AdamW, Muon, muon_groups
from atomtrain.planning.plan.updating import UpdateModel

KEY = {"device": "x"}
SHAPE = (16, 8)


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_rates, "_MATRIX", (64, 32))
    monkeypatch.setattr(update_rates, "_MOST_FLOPS", 1e4)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """Replace measurements by 3; the list says what was measured."""
    log: list[Kind] = []

    def measured(_: Any, kind: Kind) -> float:
        log.append(kind)
        return 3.0

    monkeypatch.setattr(update_rates, "_measured", measured)
    return log


def layers() -> tuple[nn.Sequential, Chain]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    return model, chain_of(model, torch.ones(2, 8), torch.sum).chain


def rated(
    optimizer: torch.optim.Optimizer, chain: Chain, folder: Path, *, one_processor: bool = True
) -> tuple[UpdateModel, UpdateModel]:
    model = update_model(optimizer, chain)
    taken = measured_updates(
        model, optimizer, chain, KEY, one_processor=one_processor, folder=folder
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


def test_wide_gradients_and_masters_are_measured_as_they_are(tmp_path: Path) -> None:
    model, chain = layers()
    model.bfloat16()
    _, taken = rated(AdamW(model.parameters(), master="split"), chain, tmp_path)
    assert all(one.host_work > 0 for one in taken.parameters.values())
