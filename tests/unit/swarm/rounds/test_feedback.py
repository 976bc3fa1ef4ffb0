"""Residuals: what encoding lost of a contribution, and when it may advance."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import (
    Anchor,
    Merge,
    Origin,
    Snapshot,
    digest_of,
    whole,
)
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.codecs.slices import Span
from tests.support.swarm_virtual import Simulation

pytestmark = pytest.mark.slow


def _store(values: torch.Tensor) -> AnchorStore:
    store = AnchorStore((values.numel(),), momentum=False)
    store.place(0, store.fresh(values.clone(), version=0, tokens=0))
    return store


def _snapshot(store: AnchorStore, local: torch.Tensor, lost: list[float]) -> Snapshot:
    store.tokens_seen += 10
    return replace(store.snapshot(0, local, torch.empty_like(local)), lost=torch.tensor(lost))


def _anchor(values: list[float], version: int) -> Anchor:
    tensor = torch.tensor(values)
    return Anchor(tensor, None, Stamp(version, 0, digest_of(tensor, None)), Origin("r", ()))


def test_residual_advances_only_where_the_contribution_was_used() -> None:
    local = torch.zeros(3)
    store = _store(local)
    local += 1.0
    snapshot = _snapshot(store, local, [0.25, 0.5, 0.125])
    assert snapshot.contribution(Span(0, 3)).tolist() == [1, 1, 1]
    new = _anchor([0.75, 2.0, 0.0], 1)
    # Slice 0 has this peer's contribution, slice 1 only those of others, slice 2 failed.
    store.merge(Merge(0, new, (Span(1, 2),), snapshot, (Span(0, 1),)), local)
    residual = store.residual(0)
    assert residual is not None
    assert residual.tolist() == [0.25, 0, 0]
    assert local.tolist() == [0.75, 3.0, 1.0]
    snapshot = _snapshot(store, local, [0.0, 0.0, 0.0])
    assert snapshot.contribution(Span(0, 3)).tolist() == [0.25, 1.0, 1.0]


def test_fetch_keeps_the_residual_and_an_abandoned_round_leaves_it() -> None:
    local = torch.zeros(2)
    store = _store(local)
    store.merge(
        Merge(0, _anchor([1.0, 1.0], 1), (), _snapshot(store, local, [0.5, 0.25]), whole(2)), local
    )
    _snapshot(store, local, [9.0, 9.0])  # its round is abandoned
    store.merge(Merge(0, _anchor([4.0, 4.0], 5), whole(2)), local)
    residual = store.residual(0)
    assert residual is not None
    assert residual.tolist() == [0.5, 0.25]


def test_a_wire_that_loses_nothing_spends_the_residual() -> None:
    local = torch.zeros(2)
    store = _store(local)
    store.merge(
        Merge(0, _anchor([1.0, 1.0], 1), (), _snapshot(store, local, [0.5, 0.25]), whole(2)), local
    )
    exact = replace(_snapshot(store, local, [0.0, 0.0]), lost=None)
    assert exact.contribution(Span(0, 2)).tolist() == [0.5, 0.25]
    store.merge(Merge(0, _anchor([2.0, 2.0], 2), (Span(0, 1),), exact, (Span(1, 2),)), local)
    residual = store.residual(0)
    assert residual is not None
    assert residual.tolist() == [0.5, 0.0]


def test_residual_survives_a_checkpoint() -> None:
    local = torch.zeros(2)
    store = _store(local)
    assert "residual.0" not in store.tensors()
    store.merge(
        Merge(0, _anchor([1.0, 1.0], 1), (), _snapshot(store, local, [0.5, 0.25]), whole(2)), local
    )
    fresh = AnchorStore((2,), momentum=False)
    fresh.load(store.tensors(), store.meta())
    residual = fresh.residual(0)
    assert residual is not None
    assert residual.tolist() == [0.5, 0.25]
    assert residual is not store.residual(0)
    fresh.forget_residual(0)
    assert fresh.residual(0) is None


@pytest.mark.parametrize("wire", ["int8", "int4", "topk"])
def test_low_bit_rounds_agree_and_lose_nothing(wire: str) -> None:
    """The simulation checks every mean and every merge; here, that all of it happened."""

    async def scenario() -> None:
        simulation = Simulation((700, 90), seed=11, wire=wire)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(60)
        averaged = [r for r in simulation.peers["a"].reports if len(r.contributors) == 3]
        assert {report.outcome for report in averaged} == {"averaged"}
        assert await simulation.settle(20)
        assert simulation.check_means() > 30
        for peer in simulation.peers.values():
            assert peer.service.context.mailbox.store.residual(0) is not None
        # float32 would take 2/3 of 2800, twice, beside 5 kB of messages and signatures.
        assert max(r.bytes_sent for r in averaged if r.fragment == 0) < 7500

    run_virtual(scenario)
