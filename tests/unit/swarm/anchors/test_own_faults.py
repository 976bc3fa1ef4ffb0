"""A step that makes no number ends no run: the peer goes back to its anchors, and blames nobody."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from tests.support.swarm_virtual import SimulatedPeer, Simulation
from tests.unit.swarm.anchors.test_trial import (
    ELEMENTS,
    FRAGMENTS,
    GOOD,
    Model,
    Peer,
    report,
    timed,
)

_SAID = "what this peer has learnt is not finite"


class Learner(Model):
    """A model with an optimizer that remembers, and that a step may spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = torch.ones(ELEMENTS)
        self.forgot = 0

    def spoil(self) -> None:
        self.moments.fill_(math.nan)
        for fragment in self.fragments:
            fragment.fill_(math.nan)

    def forget_moments(self) -> None:
        self.moments.zero_()
        self.forgot += 1


def learner(*, judged: bool, momentum: int = 0, overlap: float = 1.0) -> tuple[Peer, Learner]:
    peer = Peer(momentum=momentum, overlap=overlap)
    model = peer.model = Learner()
    peer.store.adopt_local(model)
    if judged:
        peer.mailbox.use_judge(model.loss, lambda: 0.0)
    else:
        peer.mailbox._trial = None
    return peer, model


def anchors(peer: Peer) -> list[torch.Tensor]:
    return [peer.store.anchor(fragment).values.clone() for fragment in range(FRAGMENTS)]


@pytest.mark.parametrize("judged", [True, False])
def test_all_that_is_spoilt_begins_again(caplog: pytest.LogCaptureFixture, judged: bool) -> None:
    peer, model = learner(judged=judged, momentum=1, overlap=0.5)
    peer.mailbox.leave_merge(peer.round(GOOD), report())
    peer.cross()
    peer.cross()
    held = anchors(peer)
    model.spoil()
    peer.mailbox.begin_again()
    with caplog.at_level(logging.WARNING):
        peer.cross()
        assert all(map(torch.equal, model.fragments, held))
        peer.cross()
    assert all(bool(torch.isfinite(fragment).all()) for fragment in model.fragments)
    assert model.forgot == 1, "once"
    assert model.moments.tolist() == [0.0] * ELEMENTS
    assert [peer.store.unmerged_tokens(fragment) for fragment in range(FRAGMENTS)] == [10, 10]
    assert all(peer.store.residual(fragment) is None for fragment in range(FRAGMENTS))
    assert [_SAID in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("judged", [True, False])
def test_a_round_under_way_then_leaves_nothing_but_its_anchor(judged: bool) -> None:
    """What the peer gave is in the anchor: taken off once more, it would be taken off twice."""
    peer, model = learner(judged=judged)
    peer.cross()
    merge = peer.round(GOOD)
    model.spoil()
    peer.mailbox.begin_again()
    peer.mailbox.leave_merge(merge, report())
    [said] = peer.cross()
    assert said.outcome == "averaged"
    assert torch.equal(model.fragments[0], GOOD)
    assert peer.store.anchor(0) is merge.anchor
    later = peer.round(GOOD + 0.01)
    peer.mailbox.leave_merge(later, report())
    before = model.fragments[0].clone()
    peer.model.step = lambda: None  # type: ignore[method-assign]
    peer.cross()
    assert later.snapshot is not None
    expected = before - later.snapshot.values + later.anchor.values
    torch.testing.assert_close(model.fragments[0], expected, msg="as ever")


def by_a_round(peer: Peer) -> None:
    peer.mailbox.leave_merge(peer.round(GOOD), report())


def by_a_donor(peer: Peer) -> None:
    peer.give(GOOD)


@pytest.mark.parametrize("given", [by_a_round, by_a_donor])
def test_nobody_else_is_blamed(
    caplog: pytest.LogCaptureFixture, given: Callable[[Peer], None]
) -> None:
    peer, model = learner(judged=True)
    given(peer)
    model.spoil()
    with caplog.at_level(logging.WARNING):
        [said] = peer.cross()
    assert said.outcome in ("averaged", "fetched")
    assert not peer.refusals
    assert torch.equal(model.fragments[0], GOOD)
    assert [_SAID in line for line in caplog.messages] == [True]


def test_nor_for_rounds_that_are_judged_together() -> None:
    peer, model = learner(judged=True)
    _, rounds, _ = timed(0.03, 1.0, model.loss, peer)
    rounds([GOOD] * 9)
    rounds([GOOD] * 2)
    model.spoil()
    said = rounds([GOOD] * 2)
    assert said == ["", ""]
    assert not peer.refusals
    assert model.forgot == 1
    assert math.isfinite(model.loss())


def test_where_only_the_loss_is_no_number_nothing_is_given_up() -> None:
    """As on a text that the model cannot be measured on."""
    peer, model = learner(judged=False)
    peer.mailbox.use_judge(lambda: math.nan, lambda: 0.0)
    peer.cross()
    by_a_round(peer)
    peer.cross()
    assert model.forgot == 0
    assert peer.store.unmerged_tokens(0) == 20


def _once(spoil: Callable[[SimulatedPeer], None]) -> Callable[[SimulatedPeer], None]:
    """Return a step that learns, and that spoils the peer the tenth time."""
    steps = 0

    def step(peer: SimulatedPeer) -> None:
        nonlocal steps
        steps += 1
        for fragment in peer.fragments:
            fragment.add_(1.0)
        if steps == 10:
            spoil(peer)

    return step


def _everywhere(peer: SimulatedPeer) -> None:
    for fragment in peer.fragments:
        fragment.fill_(math.nan)


def _in_one_number(peer: SimulatedPeer) -> None:
    peer.fragments[-1][0] = math.inf


def _late(reports: list[RoundReport]) -> list[str]:
    return [one.outcome for one in reports[-4:]]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [_everywhere, _in_one_number])
@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_a_peer_goes_on_after_a_step_that_made_no_number(
    names: tuple[str, ...], spoil: Callable[[SimulatedPeer], None]
) -> None:
    async def scenario() -> None:
        simulation = Simulation((30, 12), seed=6)
        ordinary: list[SimulatedPeer] = []
        spoilt = await simulation.add(names[0], step_s=0.5, step=_once(spoil))
        for name in names[1:]:
            ordinary.append(await simulation.add(name, step_s=0.5))
        await asyncio.sleep(60)
        assert any("not finite" in one.reason for one in spoilt.reports)
        assert _late(spoilt.reports) == ["averaged"] * 4
        assert names[0] in spoilt.reports[-1].contributors
        for peer in simulation.peers.values():
            assert all(bool(torch.isfinite(fragment).all()) for fragment in peer.fragments)
            assert not peer.service.context.standing.all_expelled()
        for peer in ordinary:
            assert all(peer.service.context.roster.answers(n) for n in names if n != peer.name)
        assert await simulation.settle(20)
        simulation.check_means()

    run_virtual(scenario)
