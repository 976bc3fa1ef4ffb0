"""Guards: norms, clipping, standing, starting again."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atombench.virtual.clock import run_virtual
from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Merge
from atomtrain.swarm.membership.guards import Guard, bounded_weights
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.rounds.exchange import Exchange, checked_place
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.owning import OwnedSlice, SliceReduction
from atomtrain.swarm.transport.messages import Begin
from tests.support.swarm_virtual import Simulation


def _random(seed: int, count: int, elements: int = 100) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(elements, generator=generator) for i in range(count)}


def test_an_outlier_is_rejected_and_the_rest_counts() -> None:
    values = _random(1, 5)
    values[3] = values[3] * 30
    reduction = SliceReduction(100, [10] * 5, Guard(limit=10))
    for member, contribution in values.items():
        assert reduction.add(member, contribution.clone())
    contributors, mean = reduction.close()
    assert contributors == (0, 1, 2, 4)
    assert mean is not None
    torch.testing.assert_close(mean, sum(values[i] for i in contributors) / 4)
    assert "median norm" in reduction.rejected[3]


def test_more_tokens_may_change_more_but_only_in_proportion() -> None:
    norms = {0: 300.0, 1: 10.0, 2: 9.0, 3: 11.0}
    guard = Guard(limit=10)
    assert guard.too_large(norms, 100, [400, 100, 100, 100]) == {}
    assert set(guard.too_large(norms, 100, [200, 100, 100, 100])) == {0}
    norms[0] *= 10
    assert set(guard.too_large(norms, 100, [10**9, 100, 100, 100])) == {0}, "whatever it claims"


def test_too_little_evidence_is_none() -> None:
    guard = Guard(limit=10)
    many = {0: 1000.0, 1: 1.0, 2: 1.0, 3: 1.0}
    assert guard.too_large({0: 1000.0, 1: 1.0}, 100, [1, 1]) == {}
    assert guard.too_large(many, 8, [1] * 4) == {}
    assert guard.too_large({i: 0.0 for i in range(4)}, 100, [1] * 4) == {}
    assert Guard().too_large(many, 100, [1] * 4) == {}
    assert set(guard.too_large(many, 100, [1] * 4)) == {0}


def test_a_mean_far_above_what_is_usual_is_not_taken() -> None:
    guard = Guard(limit=10)
    assert not guard.mean_too_large(9.0, 1.0, 1.0, 5, [5, 5])
    assert guard.mean_too_large(11.0, 1.0, 1.0, 5, [5, 5])
    assert not guard.mean_too_large(11.0, 1.0, 1.0, 5, [5, 10])
    assert not guard.mean_too_large(11.0, 0.0, 2.0, 5, [5, 5]), "little learnt, no veto"
    assert not guard.mean_too_large(11.0, 1.0, 0.0, 5, [5, 5]), "nothing to compare with"
    assert not guard.mean_too_large(11.0, 0.0, 1.0, 0, [0, 5]), "nothing learnt, no veto"
    standing = Standing()
    assert standing.usual_rms(0) == 0.0
    standing.observe_means(0, 40, 360.0)
    assert standing.usual_rms(0) == 3.0


@given(st.integers(0, 10**6), st.integers(3, 9))
def test_clipping_bounds_what_one_peer_can_do(seed: int, count: int) -> None:
    """However large a single lie, the clipped mean stays near the honest one."""
    values = _random(seed, count)
    honest = sum(values[i] for i in range(1, count)) / (count - 1)
    results = []
    for lie in (1e3, 1e12):
        values[0] = torch.full((100,), lie)
        results.append(Guard(mean="clipped").mean_of(values, [1] * count).values)
        assert float((results[-1] - honest).norm()) < 2.5 * math.sqrt(100)
    torch.testing.assert_close(results[0], results[1], rtol=1e-2, atol=1e-2)


def test_clipping_among_equals_is_the_mean() -> None:
    values = {i: torch.ones(50) * 3 for i in range(5)}
    mean = Guard(mean="clipped").mean_of(values, [1, 2, 3, 4, 5]).values
    torch.testing.assert_close(mean, torch.ones(50) * 3)


def test_two_that_send_next_to_nothing_do_not_make_the_others_look_too_large() -> None:
    norms = {0: 10.0, 1: 11.0, 2: 1e-3, 3: 1e-3}
    assert Guard(limit=10).too_large(norms, 100, [1] * 4) == {}
    values = _random(2, 4)
    for member in (2, 3):
        values[member] = values[member] * 1e-4
    made = Guard(mean="clipped").mean_of({i: v.clone() for i, v in values.items()}, [1] * 4)
    plain = Guard().mean_of(values, [1] * 4)
    assert float(made.values.norm()) > 0.9 * float(plain.values.norm())


@given(st.integers(0, 10**6), st.integers(3, 9))
def test_clipping_changes_nothing_among_those_that_learn_alike(seed: int, count: int) -> None:
    values = _random(seed, count, 1000)
    weights = [50 + i for i in range(count)]
    copies = {i: v.clone() for i, v in values.items()}
    clipped = Guard(mean="clipped").mean_of(copies, weights)
    plain = Guard().mean_of(values, weights)
    assert clipped.shares == ()
    assert torch.equal(clipped.values, plain.values)


def test_in_a_clipped_mean_nobody_weighs_much_more_than_the_median() -> None:
    values = {i: torch.full((50,), float(i == 3)) for i in range(4)}
    made = Guard(mean="clipped").mean_of(values, [10, 10, 10, 100])
    assert made.shares
    assert sum(made.shares) <= 1.0
    assert float(made.values.max()) <= 0.3


@pytest.mark.parametrize(
    ("claimed", "counting"),
    [
        ((1, 10**9), (1, 10**9)),  # of two nobody knows who lies
        ((5, 7, 10**9), (5, 7, 70)),
        ((0, 5, 10**9), (0, 5, 10**9)),
        ((0, 5, 5, 10**400), (0, 5, 5, 50)),
        ((10, 100, 1000), (10, 100, 1000)),
        ((10, 10, 10**6, 10**6), (10, 10, 100, 100)),
        ((1, 10**6, 10**6), (1, 10**6, 10**6)),
        ((0, 0, 0), (0, 0, 0)),
        ((), ()),
    ],
)
def test_nobody_weighs_more_than_ten_times_the_median(
    claimed: tuple[int, ...], counting: tuple[int, ...]
) -> None:
    assert bounded_weights(claimed) == counting
    assert bounded_weights(counting) == counting


@given(st.lists(st.integers(0, 10**6), max_size=9))
def test_each_member_finds_the_bounded_weights_from_its_own_claim(claimed: list[int]) -> None:
    counting = bounded_weights(claimed)
    for place, own in enumerate(claimed):
        assert bounded_weights([*counting[:place], own, *counting[place + 1 :]]) == counting


@pytest.mark.slow
def test_who_lies_about_tokens_weighs_little_more_than_others() -> None:
    async def scenario() -> None:
        simulation = Simulation((40, 50), 5)
        for name in ("a", "b", "c", "liar"):
            await simulation.add(name, 0.5)
        store = simulation.peers["liar"].service.context.mailbox.store
        real = store.unmerged_tokens
        store.unmerged_tokens = lambda fragment: 10**6 * real(fragment)  # type: ignore[method-assign]
        await asyncio.sleep(10)
        honest = simulation.peers["a"]
        before = len(honest.reports)
        await asyncio.sleep(20)
        lied = 0
        for report in honest.reports[before:]:
            weights = dict(zip(report.contributors, report.weights, strict=True))
            if len(weights) == 4:
                # The lower median of four is the second of the other three; less where it leads.
                most = 10 * sorted(weights[name] for name in "abc")[1]
                assert weights["liar"] <= most
                lied += weights["liar"] == most
        assert lied > 4
        assert simulation.check_means() > 10

    run_virtual(scenario)


def test_a_leader_that_lets_one_weigh_too_much_is_not_followed() -> None:
    snapshot: Any = SimpleNamespace(weight=500)
    setup: Any = SimpleNamespace(peer_id="me", snapshot=snapshot, leader="", counted=0)
    members = ("me", "other", "third")
    begin = Begin(
        round_id="1-x", members=members, weights=(500, 40, 50), late=(False,) * 3, exchange_s=1.0,
        bases=False, version=1, tokens=0, groups=1,
    )  # fmt: skip
    assert checked_place(setup, begin) == 0
    snapshot.weight = 10**6
    assert checked_place(setup, begin) == 0, "bounded to ten times the median"
    assert checked_place(setup, replace(begin, weights=(60, 40, 50))) == 0, "as one that is new"
    setup.counted = 8
    with pytest.raises(BadMessage, match="which it has counted in 8 rounds at least"):
        checked_place(setup, replace(begin, weights=(60, 40, 50)))
    snapshot.weight = 500
    for weights in ((501, 40, 60), (0, 40, 50), (10**6, 40, 50), (500, 40, 501 * 10)):
        with pytest.raises(BadMessage, match=r"the leader (changed|lets one weigh too much)"):
            checked_place(setup, replace(begin, weights=weights))


def test_standing_is_lost_by_repetition_and_comes_back() -> None:
    standing = Standing()
    standing.observe("p", 1, rejected=True)
    standing.observe("p", 2, rejected=False)
    standing.observe("p", 3, rejected=True)
    assert standing.excluded(4) == frozenset()
    standing.observe("p", 4, rejected=True)
    assert standing.excluded(5) == {"p"} == standing.excluded(12)
    assert standing.excluded(13) == frozenset()
    for round_index in (13, 14):
        standing.observe("p", round_index, rejected=True)
    assert standing.excluded(30) == {"p"}, "longer the next time"
    assert standing.excluded(31) == frozenset()


def test_starting_again_drops_what_no_anchor_contains() -> None:
    local = torch.zeros(2)
    store = AnchorStore((2,), momentum=False)
    store.place(0, store.fresh(local.clone(), version=0, tokens=0))
    store.tokens_seen = 50
    local += 9.0
    new = store.fresh(torch.ones(2), version=1, tokens=5)
    store.merge(Merge(0, new, (), restart=True), local)
    assert local.tolist() == [1.0, 1.0]
    assert store.snapshot(0, local, torch.empty(2)).weight == 0


def test_a_false_mean_is_not_taken_in_the_very_first_round_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has seen a mean of the fragment yet: its own size stands in for that."""
    encode, enter = OwnedSlice._encode, Exchange.__init__

    def lie(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        return encode(self, contributors, mean * getattr(self, "factor", 1.0))

    def entered(self: Exchange, setup: ExchangeSetup, begin: Begin) -> None:
        enter(self, setup, begin)
        if setup.peer_id == "liar":
            for owned in self._owned.values():
                owned.factor = 1e6  # type: ignore[attr-defined]

    monkeypatch.setattr(OwnedSlice, "_encode", lie)
    monkeypatch.setattr(Exchange, "__init__", entered)

    async def scenario() -> None:
        simulation = Simulation((300, 300), 7)
        for name in ("first", "liar", "other"):
            await simulation.add(name, 0.5)
            await asyncio.sleep(8)
        await asyncio.sleep(10)
        honest = [simulation.peers[name] for name in ("first", "other")]
        reports = [report for peer in honest for report in peer.reports]
        assert any("its mean is not" in text for one in reports for text in one.rejected)
        assert any(len(one.contributors) == 3 for one in reports)
        for peer in honest:
            assert float(torch.cat(peer.fragments).abs().max()) < 1e4

    run_virtual(scenario)
