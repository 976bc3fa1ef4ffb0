"""The end of a run: rounds go on without steps until the model is what the swarm agrees on."""

from __future__ import annotations

import asyncio

import torch

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.node.settling import patience_s, unsettled
from tests.support.swarm_virtual import SimulatedPeer, Simulation

RULES = {"wire": "int4", "overlap_weight": 0.5, "outer_momentum": 0.5, "outer_learning_rate": 0.5}


def _ahead(peer: SimulatedPeer) -> float:
    """Return how far a peer's parameters are from its anchors."""
    store = peer.service.context.mailbox.store
    return max(
        float((fragment - store.anchor(index).values).abs().max())
        for index, fragment in enumerate(peer.fragments)
    )


def test_peers_that_end_together_end_on_one_model() -> None:
    async def scenario() -> None:
        simulation = Simulation((300, 50, 20), seed=3, local_steps_per_round=1000, **RULES)
        peers = [await simulation.add(name, step_s=0.5) for name in "abc"]
        await asyncio.sleep(20)
        assert min(map(_ahead, peers)) > 1, "rounds are rare"
        for peer in peers:
            peer.training = False
            peer.service.context.agenda.hasten()
        await asyncio.sleep(5)
        for peer in peers:
            assert unsettled(peer.service.context) == []
            for mine, first in zip(peer.fragments, peers[0].fragments, strict=True):
                assert torch.equal(mine, first)
            assert _ahead(peer) == 0.0
        assert simulation.check_means() == 3 * len(peers)

    run_virtual(scenario)


def test_who_ends_first_does_not_wait_for_the_end_of_the_others() -> None:
    async def scenario() -> None:
        simulation = Simulation((300, 50), seed=4, local_steps_per_round=1000, **RULES)
        first, *others = [await simulation.add(name, step_s=0.5) for name in "abc"]
        await asyncio.sleep(20)
        assert unsettled(first.service.context) == [0, 1]
        first.training = False
        first.service.context.agenda.hasten()
        await asyncio.sleep(5)
        assert unsettled(first.service.context) == []
        assert _ahead(first) == 0.0
        assert [len(r.contributors) for r in first.reports if "a" in r.contributors] == [3, 3]
        await simulation.kill("a")
        await asyncio.sleep(5)
        before = [len(peer.reports) for peer in others]
        await asyncio.sleep(10)
        assert [len(peer.reports) for peer in others] == before, "they go on at their own pace"

    run_virtual(scenario)


def test_patience_is_bounded_by_what_was_measured() -> None:
    async def scenario() -> None:
        simulation = Simulation((300, 50), seed=5)
        peer = await simulation.add("a", step_s=0.5)
        await simulation.add("b", step_s=3.0)
        await asyncio.sleep(20)
        # Two rounds: two steps of the slowest, an exchange and the leader's decision.
        floors_s = 3 * peer.service.context.timing.floor_s
        assert 2 * (2 * 3.0 + floors_s) <= patience_s(peer.service.context) < 60

    run_virtual(scenario)
