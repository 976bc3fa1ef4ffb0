"""The gradient way: the step itself, and a whole swarm that makes it together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.errors import ConfigError
from atomtrain.swarm.anchors.updates import AdamWUpdate, OuterUpdate, Place, Update
from atomtrain.swarm.codecs.slices import Span
from atomtrain.swarm.membership.agenda import Agenda
from atomtrain.training.setup.gradients import GradientCollector
from tests.support.swarm_configs import swarm_config
from tests.support.swarm_virtual import SimulatedPeer, Simulation

pytestmark = pytest.mark.slow

_ELEMENTS = 90
_DECAYED = (Span(10, 40), Span(60, 75))


def _update() -> AdamWUpdate:
    return AdamWUpdate(
        learning_rate_at=lambda step: 0.1 / (1 + step), decayed=[_DECAYED], weight_decay=0.2
    )


@pytest.mark.parametrize(
    "update", [_update(), OuterUpdate(), OuterUpdate(learning_rate=0.7, momentum=0.9)]
)
def test_the_new_anchor_may_lie_where_the_mean_does(update: Update) -> None:
    torch.manual_seed(0)
    anchor, mean, velocity = (torch.randn(n, _ELEMENTS) for n in (1, 1, update.rows))
    velocity.abs_()
    states = [velocity.clone() if update.rows > 1 else velocity.view(-1).clone() for _ in range(2)]
    apart, place = torch.empty(_ELEMENTS), Place(0, 0, 3)
    update.apply(anchor[0], mean[0], states[0], 0.5, out=apart, place=place)
    update.apply(anchor[0], mean[0], states[1], 0.5, out=mean[0], place=place)
    assert torch.equal(apart, mean[0])
    assert torch.equal(*states)


def test_the_step_is_torchs_adamw_and_does_not_depend_on_slices() -> None:
    torch.manual_seed(0)
    whole, sliced = torch.randn(_ELEMENTS), torch.empty(0)
    sliced = whole.clone()
    moments, sliced_moments = torch.zeros(2, _ELEMENTS), torch.zeros(2, _ELEMENTS)
    decayed = torch.zeros(_ELEMENTS, dtype=torch.bool)
    for start, stop in _DECAYED:
        decayed[start:stop] = True
    kept = torch.nn.Parameter(whole[decayed].clone())
    free = torch.nn.Parameter(whole[~decayed].clone())
    optimizer = torch.optim.AdamW(
        [{"params": [kept], "weight_decay": 0.2}, {"params": [free], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for version in range(30):
        gradient = torch.randn(_ELEMENTS)
        old = sliced
        sliced = torch.empty(_ELEMENTS)
        for start, stop in ((0, 33), (33, 34), (34, _ELEMENTS)):
            _update().apply(
                old[start:stop],
                gradient[start:stop],
                sliced_moments[:, start:stop],
                out=sliced[start:stop],
                place=Place(0, start, version),
            )
        _update().apply(whole, gradient, moments, place=Place(0, 0, version))
        assert torch.equal(whole, sliced)
        assert torch.equal(moments, sliced_moments)
        kept.grad, free.grad = gradient[decayed], gradient[~decayed]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + version)
        optimizer.step()
    torch.testing.assert_close(whole[decayed], kept.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole[~decayed], free.detach(), rtol=1e-4, atol=1e-6)


def test_collector_adds_up_and_moves_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    collector = GradientCollector([weight])
    for _ in range(2):
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        collector.step()
    assert collector.state[weight]["sum"].tolist() == [2.0, 4.0, 6.0]
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_rounds_are_due_when_all_together_have_the_tokens() -> None:
    agenda = Agenda(fragments=1, local_steps_per_round=30, target_tokens=4000)
    agenda.share(tokens_per_s=1000.0, step_s=1.0)
    assert agenda.steps_per_fragment == 4
    agenda.share(tokens_per_s=4000.0, step_s=0.5)
    assert agenda.steps_per_fragment == 2
    agenda.share(tokens_per_s=1e9, step_s=1.0)
    assert agenda.steps_per_fragment == 1


def test_config() -> None:
    swarm_config(run="r", average="gradient", target_batch_tokens=5)
    for wrong in ({"average": "gradients"}, {"average": "gradient"}, {"target_batch_tokens": 5}):
        with pytest.raises(ConfigError):
            swarm_config(run="r", **wrong)  # type: ignore[arg-type]


class _GradientPeer(SimulatedPeer):
    """Learns a target by squared error; its gradients are noisy."""

    def __init__(self, simulation: Simulation, name: str, step_s: float) -> None:
        super().__init__(simulation, name, step_s, _GradientPeer.learn)
        self.service.context.updates[0] = AdamWUpdate(
            learning_rate_at=lambda step: 0.3, decayed=[()], weight_decay=0.0
        )
        self._noise = torch.Generator().manual_seed(len(simulation.peers))
        self._sum, self._steps = torch.zeros(_ELEMENTS), 0

    def learn(self) -> None:
        noise = torch.randn(_ELEMENTS, generator=self._noise)
        self._sum += self.fragments[0] - 5.0 + noise
        self._steps += 1

    @contextlib.contextmanager
    def gradient(self, index: int) -> Iterator[torch.Tensor]:
        yield self._sum / max(1, self._steps)

    def forget(self, index: int) -> None:
        self._sum, self._steps = torch.zeros(_ELEMENTS), 0

    def _record(self) -> None:
        """Changes are not what rounds average here: only anchors are compared."""
        store = self.service.context.mailbox.store
        merge_into = store.merge

        def merge(what: Any, local: torch.Tensor) -> None:
            assert torch.equal(local, store.anchor(what.fragment).values), "peers step together"
            merge_into(what, local)
            assert torch.equal(local, what.anchor.values)
            made = self.simulation.made.setdefault(what.anchor.stamp.version, set())  # type: ignore[attr-defined]
            made.add(what.anchor.stamp.digest)

        store.merge = merge  # type: ignore[method-assign]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["float32", "int8"]), st.floats(2.0, 20.0))
def test_all_members_are_equal_after_each_step_whoever_dies(
    seed: int, wire: str, dies_after_s: float
) -> None:
    async def scenario() -> None:
        simulation = Simulation(
            (_ELEMENTS,), seed, wire=wire, average="gradient", target_batch_tokens=90
        )
        simulation.made = {}  # type: ignore[attr-defined]

        async def add(name: str, step_s: float) -> None:
            peer = simulation.peers[name] = _GradientPeer(simulation, name, step_s)
            await peer.start()

        for name, step_s in (("a", 0.3), ("b", 0.2), ("c", 0.9)):
            await add(name, step_s)
        await asyncio.sleep(dies_after_s)
        await simulation.kill("b")
        await asyncio.sleep(10)
        await add("d", 0.3)
        await asyncio.sleep(40)
        assert await simulation.settle(30)
        made: dict[int, set[str]] = simulation.made  # type: ignore[attr-defined]
        assert max(made) > 20
        assert sum(len(digests) > 1 for digests in made.values()) <= 1, "but for the splitting hour"
        together = [r for r in simulation.peers["d"].reports if len(r.contributors) == 3]
        assert together
        for peer in simulation.peers.values():
            assert float((peer.fragments[0] - 5.0).abs().mean()) < 1.5
            assert peer.service.context.mailbox.store.anchor(0).velocity.numel() == 2 * _ELEMENTS

    run_virtual(scenario)
