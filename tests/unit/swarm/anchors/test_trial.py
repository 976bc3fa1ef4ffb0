"""Trials: what a merge does to this peer's loss decides, and what is undone leaves no trace."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Origin, digest_of, whole
from atomtrain.swarm.anchors.losses import (
    COST_SHARE,
    DRIFT_NATS,
    MARGIN_NATS,
    MOST_UNJUDGED,
    Cost,
    Losses,
)
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport, TrainerMailbox
from atomtrain.swarm.anchors.trial import Refusal, Trial

ELEMENTS = 6
FRAGMENTS = 2


class Model:
    """Fragments of numbers; its loss is a constant and how far they are from zero."""

    def __init__(self, fragments: int = FRAGMENTS) -> None:
        source = torch.Generator().manual_seed(7)
        self.fragments = [torch.randn(ELEMENTS, generator=source) * 0.1 for _ in range(fragments)]

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]

    def step(self) -> None:
        for fragment in self.fragments:
            fragment.add_(0.01)

    def loss(self) -> float:
        return 1.0 + sum(float(f.abs().mean()) for f in self.fragments)


class Peer:
    """A model, its store and its mailbox, with a judge that may be made to wait."""

    def __init__(
        self, judge: Callable[[], float] | None = None, *, momentum: int = 0, overlap: float = 1.0
    ) -> None:
        self.model = Model()
        self.store = AnchorStore((ELEMENTS,) * FRAGMENTS, momentum, overlap)
        self.store.adopt_local(self.model)
        self.refusals: list[Refusal] = []
        self.mailbox = TrainerMailbox(self.store, lambda steps, merges: None)
        self.mailbox.on_refusal = self.refusals.append
        self.mailbox.use_judge(judge or self.model.loss, lambda: 0.0)

    def cross(self, tokens: int = 10) -> list[RoundReport]:
        self.model.step()
        return self.mailbox.boundary(
            steps=1, tokens=tokens, tokens_per_s=1.0, step_s=1.0, access=self.model
        )

    def anchor(self, values: torch.Tensor, fragment: int = 0, *, round_id: str = "r") -> Anchor:
        old = self.store.anchor(fragment)
        velocity = None if old.velocity is None else torch.full_like(old.velocity, 3.0)
        stamp = Stamp(old.stamp.version + 1, old.stamp.tokens + 30, digest_of(values, velocity))
        return Anchor(values, velocity, stamp, Origin(round_id, ()))

    def round(self, values: torch.Tensor, fragment: int = 0) -> Merge:
        """Return what a round makes, of a snapshot that is taken now."""
        local = self.model.fragments[fragment]
        snapshot = self.store.snapshot(fragment, local, torch.empty(ELEMENTS))
        return Merge(fragment, self.anchor(values, fragment), (), snapshot, whole(ELEMENTS))

    def give(self, values: torch.Tensor, fragment: int = 0, donor: str = "donor") -> Merge:
        merge = Merge(fragment, self.anchor(values, fragment), whole(ELEMENTS), donor=donor)
        self.mailbox.leave_merge(merge, report("fetched", fragment))
        return merge

    def everything(self) -> list[object]:
        """Return all bits there are, as what can be compared and is not changed any more."""
        held = [self.store.holding(f) for f in range(FRAGMENTS)]
        tensors = [
            *self.model.fragments,
            *(t for h in held for t in (h.residual, h.velocity) if t is not None),
            *(t for h in held if h.anchor for t in (h.anchor.values, h.anchor.velocity)
              if t is not None),
        ]  # fmt: skip
        counts = [(h.tokens_merged, h.measured_from, h.residual is None, h.velocity is None)
                  for h in held]  # fmt: skip
        return [[t.tolist() for t in tensors], counts, self.store.meta(), self.store.stamps()]


def report(outcome: str = "averaged", fragment: int = 0, index: int = 1) -> RoundReport:
    return RoundReport(round=index, fragment=fragment, version=1, outcome=outcome)


GOOD, BAD = torch.zeros(ELEMENTS), torch.full((ELEMENTS,), 5.0)


# What is too much


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (2.3, 8.6, True),
        (3.0, 3.59, False),
        (3.0, 3.61, True),
        (0.1, 0.1 + 0.9 * MARGIN_NATS, False),
        (0.1, 0.1 + 1.1 * MARGIN_NATS, True),
        (8.6, 2.3, False),
        (2.3, math.nan, True),
        (2.3, math.inf, True),
        (math.nan, 2.3, False),
        (math.inf, 2.3, False),
        (math.nan, math.nan, True),
    ],
)
def test_a_margin_is_a_share_of_the_loss_and_not_nothing(
    before: float, after: float, refused: bool
) -> None:
    assert bool(Losses().objection(after, before)) == refused


def test_a_drift_in_small_steps_is_stopped() -> None:
    losses, loss, steps = Losses(), 3.0, 0
    losses.note(loss)
    while not losses.objection(1.05 * loss, loss):
        loss, steps = 1.05 * loss, steps + 1
        losses.note(loss)
        assert steps < 20
    assert 3.0 + DRIFT_NATS < loss < 1.4 * 3.0
    assert not losses.objection(0.99 * loss, loss), "what makes it better is always taken"
    assert "3.000 not long ago" in losses.objection(1.05 * loss, loss)


def test_a_lowest_loss_is_forgotten() -> None:
    losses = Losses()
    losses.note(1.0)
    for _ in range(64):
        losses.note(3.0)
    assert not losses.objection(3.1, 3.0)


# Merges that are undone


@pytest.mark.parametrize("momentum", [0, 1])
@pytest.mark.parametrize("overlap", [1.0, 0.25])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["round", "fetched", "grouped", "restart"])
def test_undoing_leaves_every_bit_as_it_was(
    momentum: int, overlap: float, residual: bool, kind: str
) -> None:
    peer = Peer(momentum=momentum, overlap=overlap)
    if residual:
        peer.cross()
        first = peer.round(GOOD)
        peer.cross()
        lost = torch.linspace(-1, 1, ELEMENTS)
        assert first.snapshot is not None
        peer.store._residuals[0] = lost
        peer.mailbox.leave_merge(first, report())
        peer.cross()
        assert peer.store.residual(0) is not None
    peer.cross()
    merge = peer.round(BAD / 2)  # near enough to be tried
    if kind == "fetched":
        merge = Merge(0, merge.anchor, whole(ELEMENTS), donor="donor")
    if kind == "grouped":
        anchor = Anchor(BAD / 2, None, merge.anchor.stamp, merge.anchor.origin, grouped=True)
        own = torch.full((ELEMENTS,), 9.0) if momentum else None
        merge = Merge(0, anchor, (), merge.snapshot, whole(ELEMENTS), velocity=own)
    if kind == "restart":
        merge = Merge(0, merge.anchor, (), merge.snapshot, whole(ELEMENTS), restart=True)
    peer.cross(tokens=0)
    before = peer.everything()
    peer.model.step = lambda: None  # type: ignore[method-assign]
    peer.mailbox.leave_merge(merge, report("fetched" if merge.donor else "averaged"))
    [said] = peer.cross(tokens=0)
    assert peer.everything() == before
    assert said.outcome == "refused"
    assert said.version == peer.store.anchor(0).stamp.version
    assert "rise from" in said.reason
    assert [(r.stamp, r.donor) for r in peer.refusals] == [(merge.anchor.stamp, merge.donor)]
    assert peer.mailbox.stamp(0) == peer.store.anchor(0).stamp


@pytest.mark.parametrize("overlap", [1.0, 0.25])
def test_what_is_taken_has_the_bits_that_it_has_without_a_trial(overlap: float) -> None:
    tried, plain = Peer(momentum=1, overlap=overlap), Peer(momentum=1, overlap=overlap)
    plain.mailbox._trial = None
    for number in range(5):
        for peer in (tried, plain):
            merge = peer.round(GOOD + 0.01 * number, number % FRAGMENTS)
            peer.cross()
            if number == 3:
                peer.give(GOOD - 0.01, merge.fragment)
            else:
                peer.mailbox.leave_merge(merge, report(fragment=merge.fragment))
            [said] = peer.cross()
            assert said.outcome in ("averaged", "fetched")
    assert tried.everything() == plain.everything()
    assert not tried.refusals


def test_one_warning_says_it_in_words(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    with caplog.at_level(logging.WARNING):
        peer.give(BAD, donor="QmTheDonor")
        peer.cross()
    [line] = caplog.messages
    assert "TheDonor" in line
    assert "nats per token" in line


def test_nobody_sees_an_anchor_before_its_trial_has_ended() -> None:
    seen: list[Stamp] = []
    free: list[bool] = []

    def look() -> None:
        free.append(peer.mailbox._lock.acquire(timeout=5))
        peer.mailbox._lock.release()
        seen.append(peer.store.anchor(0).stamp)

    def judge() -> float:
        network = threading.Thread(target=look)
        network.start()
        network.join()
        return peer.model.loss()

    peer = Peer(judge)
    old = peer.store.anchor(0).stamp
    merge = peer.give(GOOD)
    peer.cross()
    assert set(seen) == {old}
    assert all(free), "the network thread does not wait for a judgement"
    assert peer.store.anchor(0).stamp == merge.anchor.stamp


def test_a_judge_that_fails_leaves_all_as_it_was() -> None:
    def judge() -> float:
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(peer.model.loss())
        return calls[-1]

    calls: list[float] = []
    peer = Peer(judge)
    peer.give(BAD)
    peer.model.step = lambda: None  # type: ignore[method-assign]
    before = peer.everything()
    with pytest.raises(KeyboardInterrupt):
        peer.cross(tokens=0)
    assert peer.everything() == before


def test_what_makes_the_loss_not_finite_never_stays() -> None:
    peer = Peer()
    huge = torch.full((ELEMENTS,), 3e38)
    peer.mailbox.leave_merge(peer.round(huge), report())
    [said] = peer.cross()
    assert said.outcome == "refused"
    assert math.isfinite(peer.model.loss())


# Anchors that do harm together with what this peer has learnt alone


def _apart(fragments: int = 1) -> Peer:
    """Return a peer that has come most of the way alone: from 3 to 0.2, where 0 is best."""
    peer = Peer()
    for fragment in range(fragments):
        values = torch.full((ELEMENTS,), 3.0)
        peer.model.fragments[fragment].copy_(values)
        peer.store.place(fragment, peer.store.fresh(values, version=0, tokens=0))
        peer.model.fragments[fragment].fill_(0.2)
    peer.model.step = lambda: None  # type: ignore[method-assign]
    return peer


def test_a_good_anchor_that_has_what_this_peer_learnt_is_taken_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own progress a second time would carry it from 0.2 to -2.8."""
    peer = _apart()
    merge = peer.give(GOOD)
    with caplog.at_level(logging.WARNING):
        [said] = peer.cross()
    assert said.outcome == "fetched"
    assert not peer.refusals
    assert torch.equal(peer.model.fragments[0], GOOD)
    assert peer.store.anchor(0) is merge.anchor
    assert peer.store.unmerged_tokens(0) == 0
    assert peer.store.residual(0) is None
    assert ["starts again from the fetched anchors" in line for line in caplog.messages] == [True]


def test_an_anchor_that_does_harm_by_itself_is_refused_and_undone() -> None:
    peer = _apart()
    peer.give(BAD)
    before = [peer.model.fragments[0].clone(), peer.store.anchor(0)]
    [said] = peer.cross()
    assert said.outcome == "refused"
    assert torch.equal(peer.model.fragments[0], before[0])
    assert peer.store.anchor(0) is before[1]
    assert peer.store.unmerged_tokens(0) == 10
    assert len(peer.refusals) == 1


def test_nobody_is_told_that_this_peer_has_had_what_it_refused() -> None:
    """Neither while it is tried, together with its own progress and without, nor afterwards."""
    peer, given = _apart(), list[Merge]()
    told = list[bool]()

    def judge() -> float:
        told.extend(peer.store.had(0, merge.anchor.stamp) for merge in given)
        return peer.model.loss()

    peer.mailbox.use_judge(judge, lambda: 0.0)
    own = peer.store.anchor(0).stamp
    for _ in range(40):  # more than it remembers anchors
        given.append(peer.give(BAD * (1 + len(given))))
        [said] = peer.cross()
        assert said.outcome == "refused"
    assert len(told) > 3 * 40
    assert not any(told)
    assert not any(peer.store.had(0, merge.anchor.stamp) for merge in given)
    assert peer.store.had(0, own)


def test_who_has_learnt_nothing_alone_judges_an_anchor_once() -> None:
    asked: list[float] = []

    def judge() -> float:
        asked.append(peer.model.loss())
        return asked[-1]

    peer = Peer(judge)
    peer.model.step = lambda: None  # type: ignore[method-assign]
    peer.give(BAD)
    [said] = peer.cross(tokens=0)
    assert said.outcome == "refused"
    assert len(asked) == 2


def test_of_several_anchors_the_good_ones_are_taken_by_themselves() -> None:
    peer = _apart(2)
    peer.give(GOOD, 0, "honest")
    peer.give(BAD, 1, "liar")
    said = peer.cross()
    assert [one.outcome for one in said] == ["fetched", "refused"]
    assert [refusal.donor for refusal in peer.refusals] == ["liar"]
    assert torch.equal(peer.model.fragments[0], GOOD)
    torch.testing.assert_close(peer.model.fragments[1], torch.full((ELEMENTS,), 0.2))


def test_anchors_that_fit_only_each_other_are_taken_together() -> None:
    """Each alone makes the loss worse, with this peer's own progress or without."""
    peer = _apart(2)

    def apart() -> float:
        one, other = (float(fragment.mean()) for fragment in peer.model.fragments)
        return 1.0 + abs(one - other) + 0.1 * abs(one + other)

    peer.mailbox.use_judge(apart, lambda: 0.0)
    for fragment in range(2):
        peer.give(torch.full((ELEMENTS,), -1.0), fragment)
    peer.model.fragments[1].fill_(0.7)
    said = peer.cross()
    assert [one.outcome for one in said] == ["fetched", "fetched"]
    assert all(torch.equal(f, torch.full((ELEMENTS,), -1.0)) for f in peer.model.fragments)


# Momentum


def is_dropped(velocity: torch.Tensor) -> bool:
    return not velocity.any() and bool(velocity.signbit().all())


def _refused_twice(peer: Peer) -> None:
    for _ in range(2):
        peer.mailbox.leave_merge(peer.round(BAD), report())
        assert [said.outcome for said in peer.cross(tokens=0)] == ["refused"]


def _with_velocity() -> Peer:
    peer = Peer(momentum=1)
    peer.mailbox.leave_merge(peer.round(GOOD), report())
    assert [said.outcome for said in peer.cross()] == ["averaged"]
    return peer


def test_two_rounds_in_a_row_that_do_harm_cost_the_momentum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be what carries an honest mean too far, and would be in every round."""
    one, other = _with_velocity(), _with_velocity()
    before = one.store.anchor(0)
    for peer in (one, other):
        with caplog.at_level(logging.WARNING):
            _refused_twice(peer)
    after = one.store.anchor(0)
    assert after.values is before.values
    assert before.velocity is not None
    assert before.velocity.any()
    assert after.velocity is not None
    assert is_dropped(after.velocity)
    assert after.stamp.beats(before.stamp)
    assert after.stamp.tokens == before.stamp.tokens
    assert after.stamp == other.store.anchor(0).stamp, "all who do it have the same"
    assert one.store.had(0, after.stamp)
    assert after.origin == before.origin
    assert after.stamp == Stamp(2, 30, digest_of(after.values, after.velocity))
    _refused_twice(one)
    assert one.store.anchor(0) is after, "once is enough"
    assert not one.round(GOOD).snapshot.late, "what was measured from it still is"  # type: ignore[union-attr]
    assert sum("outer momentum is dropped" in said for said in caplog.messages) == 2


def test_one_round_that_does_harm_costs_no_momentum() -> None:
    peer = _with_velocity()
    for _ in range(3):
        peer.mailbox.leave_merge(peer.round(BAD), report())
        peer.cross()
        peer.mailbox.leave_merge(peer.round(GOOD), report())
        assert [said.outcome for said in peer.cross()] == ["averaged"]
    velocity = peer.store.anchor(0).velocity
    assert velocity is not None
    assert velocity.any()


def test_where_there_is_no_momentum_the_anchor_stays() -> None:
    peer = Peer()
    before = peer.store.anchor(0)
    _refused_twice(peer)
    assert peer.store.anchor(0) is before


def test_beside_a_groups_anchor_a_peer_drops_its_own_velocity() -> None:
    store = AnchorStore((ELEMENTS,), 1)
    anchor = Anchor(torch.zeros(ELEMENTS), None, Stamp(3, 40, "d"), grouped=True)
    store.place(0, anchor)
    store.hold(0, store.holding(0)._replace(velocity=torch.ones(ELEMENTS)))
    assert store.drop_momentum(0)
    velocity = store.velocity(0)
    assert velocity is not None
    assert is_dropped(velocity)
    assert store.anchor(0) is anchor
    assert not store.drop_momentum(0), "once is enough"


def test_the_optimizers_moments_are_no_momentum_to_drop() -> None:
    store = AnchorStore((ELEMENTS,), 2, gradients=True)
    moments = torch.ones(2 * ELEMENTS)
    store.place(0, Anchor(torch.zeros(ELEMENTS), moments, Stamp(3, 40, "d")))
    assert not store.drop_momentum(0)


def test_rounds_that_are_judged_together_cost_the_momentum_together() -> None:
    peer = Peer(momentum=1)
    _, rounds, _ = timed(0.03, 1.0, peer.model.loss, peer)
    rounds([GOOD] * 9)
    good = peer.store.anchor(0)
    rounds([BAD] * 4)
    assert peer.store.anchor(0) is good
    rounds([BAD] * 4)
    assert peer.store.anchor(0).stamp == good.stamp.next(0, peer.store.anchor(0).stamp.digest)
    assert peer.store.anchor(0).values is good.values


@pytest.mark.parametrize("judged_s", [0.0, 0.03], ids=["each", "together"])
def test_no_merge_is_to_blame_for_what_this_peer_learns_by_heart(judged_s: float) -> None:
    """Its own steps raise the loss from 1 to 5, and each round makes it worse by a hundredth."""
    steps = [0]
    peer = Peer()
    _, rounds, _ = timed(
        judged_s, 1.0, lambda: 1.0 + 0.1 * steps[0] + 0.1 * peer.model.loss(), peer
    )
    for _ in range(40):
        steps[0] += 1
        assert rounds([peer.store.anchor(0).values + 0.1]) == [""]
    assert peer.refusals == []


@pytest.mark.parametrize("judged_s", [0.0, 0.03], ids=["each", "together"])
def test_merges_that_raise_the_loss_are_refused_whatever_this_peer_learns(judged_s: float) -> None:
    steps = [0]
    peer = Peer()
    _, rounds, _ = timed(
        judged_s, 1.0, lambda: 1.0 + 0.02 * steps[0] + 0.3 * peer.model.loss(), peer
    )
    for _ in range(30):
        steps[0] += 1
        rounds([peer.store.anchor(0).values + 0.5])
    assert peer.refusals
    assert float(peer.store.anchor(0).values.mean()) < 5.0, "of the 15 that all together make"


# Several fragments


def test_fragments_that_need_each_other_wait_for_each_other() -> None:
    """Each alone makes the loss worse, both together make it better."""
    peer = Peer(lambda: 1.0 + abs(float(peer.model.fragments[0][0] - peer.model.fragments[1][0])))
    peer.mailbox.coming = True
    first = peer.give(BAD, 0)
    assert peer.cross() == []
    assert peer.mailbox.stamp(0) == first.anchor.stamp, "it is not to be fetched again"
    assert peer.store.anchor(0).stamp.version == 0
    second = peer.give(BAD, 1)
    assert [said.outcome for said in peer.cross()] == ["fetched"] * 2
    assert peer.store.stamps() == (first.anchor.stamp, second.anchor.stamp)


def test_of_several_fragments_the_good_ones_are_taken() -> None:
    peer = Peer()
    peer.mailbox.coming = True
    peer.give(BAD, 0, "liar")
    peer.cross()
    good = peer.give(GOOD, 1, "honest")
    peer.mailbox.coming = False
    assert sorted(said.outcome for said in peer.cross()) == ["fetched", "refused"]
    assert [refusal.donor for refusal in peer.refusals] == ["liar"]
    assert peer.store.anchor(1).stamp == good.anchor.stamp


def test_what_others_have_bettered_meanwhile_is_not_tried() -> None:
    peer = Peer()
    peer.mailbox.coming = True
    peer.give(BAD)
    peer.cross()
    for _ in range(2):  # rounds on the old anchor go on
        peer.mailbox.leave_merge(peer.round(GOOD), report())
        assert [said.outcome for said in peer.cross()] == ["averaged"]
    peer.mailbox.coming = False
    assert [said.outcome for said in peer.cross()] == ["abandoned"]
    assert not peer.refusals


def test_a_round_on_an_anchor_that_was_given_up_is_dropped() -> None:
    peer = Peer()
    merge = peer.round(GOOD)
    peer.give(GOOD)
    peer.cross()
    peer.mailbox.leave_merge(merge, report())
    [said] = peer.cross()
    assert said.outcome == "abandoned"


# Rounds that are judged together


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def timed(
    judged_s: float, between_s: float, loss: Callable[[], float], peer: Peer
) -> tuple[Trial, Callable[[Sequence[torch.Tensor]], list[str]], Clock]:
    """Return a trial whose judge takes its time, and what brings rounds, and the clock."""
    clock = Clock()

    def judge() -> float:
        clock.now_s += judged_s
        return loss()

    trial = Trial(judge, peer.store, threading.RLock(), peer.refusals.append, clock)
    made = [0]

    def rounds(values: Sequence[torch.Tensor]) -> list[str]:
        said = []
        for one in values:
            clock.now_s += between_s
            said.append(trial.take_round(peer.round(one), peer.model, made[0]))
            made[0] += 1
        return said

    return trial, rounds, clock


@pytest.mark.parametrize("judged_s", [0.0, 0.004, 0.02, 0.05])
def test_judging_takes_no_more_than_its_share(judged_s: float) -> None:
    peer, spent = Peer(), [0.0]

    def loss() -> float:
        spent[0] += judged_s
        return peer.model.loss()

    _, rounds, clock = timed(judged_s, 1.0, loss, peer)
    rounds([GOOD] * 200)
    assert spent[0] <= 1.2 * COST_SHARE * clock.now_s
    assert judged_s == 0.0 or spent[0] > 0.2 * COST_SHARE * clock.now_s


def test_it_is_done_now_and_then_whatever_it_takes() -> None:
    clock, judged = Clock(), 0

    def judge() -> float:
        nonlocal judged
        judged += 1
        clock.now_s += 100.0
        return 1.0

    cost = Cost(clock)
    for _ in range(3):
        clock.now_s += 1.0
        cost.on_round()
        cost.measured(judge)
    assert cost.every <= MOST_UNJUDGED
    assert cost.every >= MOST_UNJUDGED // 2


def test_rounds_that_are_judged_together_go_back_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer = Peer()
    _, rounds, _ = timed(0.03, 1.0, peer.model.loss, peer)
    rounds([GOOD] * 9)  # of which the last is judged: four are, together
    good = peer.store.anchor(0)
    peer.model.step()
    with caplog.at_level(logging.WARNING):
        said = rounds([GOOD + 0.01, BAD, BAD + 0.01, BAD])
    assert [bool(one) for one in said] == [False, False, False, True]
    assert "last good anchors" in said[-1]
    assert peer.store.anchor(0) is good
    torch.testing.assert_close(peer.model.fragments[0], good.values)
    assert len(peer.refusals) == 1
    assert len(caplog.messages) == 1


def test_what_a_peers_own_steps_have_done_is_not_undone() -> None:
    """Going back would not help, so nothing moves, not by a bit."""
    peer = Peer()
    own = [0.0]
    _, rounds, _ = timed(0.03, 1.0, lambda: peer.model.loss() + own[0], peer)
    rounds([GOOD] * 9)
    own[0] = 5.0
    rounds([GOOD + 0.01] * 3)
    fragments = [fragment.clone() for fragment in peer.model.fragments]
    plain = peer.round(GOOD)
    [why] = rounds([GOOD])
    assert not why
    assert not peer.refusals
    assert peer.store.anchor(0).stamp == plain.anchor.stamp
    assert torch.equal(peer.model.fragments[0], GOOD + (fragments[0] - fragments[0]))
