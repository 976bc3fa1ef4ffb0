"""What no round speaks for: anchors that are far away, and those that only a hash puts first."""

from __future__ import annotations

import pytest
import torch

from atomtrain.swarm.anchors.anchors import Anchor, Merge, digest_of, whole
from atomtrain.swarm.anchors.losses import Losses
from atomtrain.swarm.anchors.moves import FACTOR, LATELY, LEAST_MOVES, LEAST_SHARE, Moves
from atomtrain.swarm.anchors.stamps import Stamp
from tests.unit.swarm.anchors.test_trial import ELEMENTS, Peer, report, timed


def anchor(value: float, version: int = 0, elements: int = 300_000) -> Anchor:
    return Anchor(torch.full((elements,), value), None, Stamp(version, 10 * version, "d"))


def settled(by: float, rounds: int = 3) -> Peer:
    """Return a peer at rest, whose rounds have moved its first anchor by so much each."""
    peer = Peer()
    peer.model.step = lambda: None  # type: ignore[method-assign]
    for _ in range(rounds):
        peer.mailbox.leave_merge(peer.round(peer.store.anchor(0).values + by), report())
        assert [said.outcome for said in peer.cross(0)] == ["averaged"]
    return peer


def raised(peer: Peer, rise: float) -> torch.Tensor:
    """Return values at which the loss is higher by so much: all are further from zero."""
    own = peer.store.anchor(0).values
    return own + rise * own.sign()


def tied(peer: Peer, rise: float) -> Merge:
    """Return an anchor with the stamp of the peer's own but for its hash, which is lower."""
    own, tries = peer.store.anchor(0), 0
    while True:
        tries += 1
        values = raised(peer, rise * (1 + 1e-5 * tries))
        stamp = Stamp(own.stamp.version, own.stamp.tokens, digest_of(values, None))
        if stamp.beats(own.stamp):
            return Merge(0, Anchor(values, None, stamp), whole(ELEMENTS), donor="liar")


def test_what_is_a_few_rounds_away_is_explained_and_what_is_further_is_not() -> None:
    moves, own = Moves(), anchor(1.0, 7)
    assert moves.explain(0, own, anchor(1e6, 8)), "nothing was seen yet"
    moves.note(0, anchor(0.75, 6), own)
    assert moves.explain(0, own, anchor(1.0 + 0.25 * FACTOR * 1.9, 8))
    assert not moves.explain(0, own, anchor(1.0 + 0.25 * FACTOR * 2.1, 8))
    assert moves.explain(0, own, anchor(1.0 + 0.25 * FACTOR * 3.9, 4)), "versions either way"
    assert moves.explain(1, own, anchor(1e6, 8)), "other fragments are others"


def test_rounds_that_are_noted_together_count_as_so_many() -> None:
    moves = Moves()
    moves.note(0, anchor(0.0, 3), anchor(1.0, 7))
    assert not moves.explain(0, anchor(0.0), anchor(0.25 * FACTOR * 1.1))
    assert moves.explain(0, anchor(0.0), anchor(0.25 * FACTOR * 0.9))


def test_old_moves_are_forgotten() -> None:
    moves = Moves()
    moves.note(0, anchor(0.0), anchor(1.0, 1))
    for _ in range(LATELY):
        moves.note(0, anchor(0.0), anchor(1e-3, 1))
    assert not moves.explain(0, anchor(0.0), anchor(1.0))


def test_only_what_all_rounds_of_both_cannot_have_moved_is_impossible() -> None:
    moves = Moves(lambda: 7.0)
    own, versions = anchor(1.0, 7), 1 + 7 + 12
    for _ in range(LEAST_MOVES):
        assert not moves.objection(0, own, anchor(1e6, 12)), "too little was seen yet"
        moves.note(0, anchor(0.75, 6), own)
    assert not moves.objection(0, own, anchor(1.0 + 0.25 * FACTOR * 0.99 * versions, 12))
    said = moves.objection(0, own, anchor(1.0 + 0.25 * FACTOR * 1.01 * versions, 12))
    assert f"further than {versions} rounds" in said
    assert moves.objection(0, own, anchor(3e38, 12))


def test_who_has_seen_tiny_moves_only_has_seen_little() -> None:
    """It slept while the learning rate rose; so any round may have moved a part of its size."""
    moves, own = Moves(lambda: 7.0), anchor(1.0, 1)
    for _ in range(LEAST_MOVES):
        moves.note(0, own, anchor(1.0 + 1e-6, 2))
    away = LEAST_SHARE * FACTOR * (1 + 1 + 30)
    assert not moves.objection(0, own, anchor(1.0 + 0.99 * away, 30))
    assert moves.objection(0, own, anchor(1.0 + 1.01 * away, 30))


def paced() -> tuple[Moves, list[float]]:
    """Return the moves of a peer whose rounds took 10 and 20 s, at version 3; and its clock."""
    now_s = [0.0]
    moves = Moves(lambda: now_s[0])
    for version, at_s in enumerate((0.0, 10.0, 30.0), 1):
        now_s[0] = at_s
        moves.note(0, anchor(0.0, version - 1), anchor(0.25, version))
    return moves, now_s


@pytest.mark.parametrize(
    ("later_s", "claimed", "believed"),
    [(0.0, 4, 3), (9.9, 4, 3), (10.0, 4, 4), (25.0, 4, 4), (25.0, 5, 5), (25.0, 10**9, 5),
     (10_000.0, 10**9, 1003), (25.0, 1, 1)],
)  # fmt: skip
def test_of_versions_that_are_claimed_those_count_that_there_was_time_for(
    later_s: float, claimed: int, believed: int
) -> None:
    """The shortest round took 10 s."""
    moves, now_s = paced()
    own = anchor(1.0, 3)
    now_s[0] += later_s
    room = 0.25 * FACTOR * (1 + abs(believed - 3))
    assert moves.explain(0, own, anchor(1.0 + 0.99 * room, claimed))
    assert not moves.explain(0, own, anchor(1.0 + 1.01 * room, claimed))
    most = 0.25 * FACTOR * (1 + 3 + believed)
    assert not moves.objection(0, own, anchor(1.0 + 0.99 * most, claimed))
    said = moves.objection(0, own, anchor(1.0 + 1.01 * most, claimed))
    assert f"further than {1 + 3 + believed} rounds" in said


def test_an_anchor_of_ones_own_that_was_fetched_since_is_believed() -> None:
    moves, _ = paced()
    own = anchor(1.0, 50)
    assert moves.explain(0, own, anchor(1.0 + 0.25 * FACTOR * 0.99, 60))
    assert not moves.explain(0, own, anchor(1.0 + 0.25 * FACTOR * 1.01, 60))


def test_who_has_been_in_one_round_does_not_know_how_long_they_take() -> None:
    moves = Moves(lambda: 7.0)
    moves.note(0, anchor(0.0), anchor(0.25, 1))
    moves.note(0, anchor(0.0, 1), anchor(0.25, 2))  # at once: of rounds that are judged together
    assert moves.explain(0, anchor(0.0, 2), anchor(0.25 * FACTOR * 90, 100))


@pytest.mark.parametrize(("later_s", "tried"), [(0.0, False), (100_000.0, True)])
def test_a_claim_of_many_versions_has_nothing_tried_that_is_too_far(
    later_s: float, tried: bool
) -> None:
    peer, asked, now_s = Peer(), [0], [0.0]

    def judge() -> float:
        asked[0] += 1
        return 1.0

    peer.mailbox.use_judge(judge, lambda: now_s[0])
    for number in range(3):
        now_s[0] += 10.0
        values = peer.store.anchor(0).values
        peer.mailbox.leave_merge(peer.round(values + 0.002 * (number + 1)), report())
        assert [said.outcome for said in peer.cross(0)] == ["averaged"]
    now_s[0] += later_s
    before = asked[0]
    values = torch.full((ELEMENTS,), 5.0)
    stamp = Stamp(10_000, 10**6, digest_of(values, None))
    merge = Merge(0, Anchor(values, None, stamp), whole(ELEMENTS), donor="liar")
    peer.mailbox.leave_merge(merge, report("fetched"))
    [said] = peer.cross(0)
    assert said.outcome == ("fetched" if tried else "refused")
    assert (asked[0] > before) == tried


@pytest.mark.parametrize(("after", "refused"), [(3.14, False), (3.16, True), (2.0, False)])
def test_the_close_margin_is_a_quarter_of_the_usual_one(after: float, refused: bool) -> None:
    assert bool(Losses().objection(after, 3.0, close=True)) == refused
    assert not Losses().objection(after, 3.0)


@pytest.mark.parametrize(("rise", "outcome"), [(0.03, "fetched"), (0.1, "refused")])
def test_a_lower_hash_wins_nothing_but_a_trial(rise: float, outcome: str) -> None:
    """Anybody finds one in a few tries. What has more tokens may raise the loss by as much."""
    peer = settled(0.05)
    merge = tied(peer, rise)
    peer.mailbox.leave_merge(merge, report("fetched"))
    assert [said.outcome for said in peer.cross(0)] == [outcome]
    assert bool(peer.refusals) == (outcome == "refused")
    other = settled(0.05)
    other.give(raised(other, rise))
    assert [said.outcome for said in other.cross(0)] == ["fetched"]


@pytest.mark.parametrize(("by", "outcome"), [(0.05, "fetched"), (0.002, "refused")])
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_further_away_than_rounds_go_may_hardly_raise_the_loss(
    by: float, outcome: str, alone: bool
) -> None:
    peer = settled(by)
    peer.store.tokens_seen += 10 * (not alone)  # progress of its own, without which it tries again
    peer.give(raised(peer, 0.1))
    [said] = peer.cross(0)
    assert said.outcome == outcome
    if outcome == "refused":
        assert "would rise" in said.reason
        peer.give(raised(peer, 0.01))
        assert [said.outcome for said in peer.cross(0)] == ["fetched"]


def test_what_no_rounds_can_have_moved_so_far_is_not_tried() -> None:
    asked: list[float] = []

    def judge() -> float:
        asked.append(1.0)
        return 1.0  # whatever it is

    peer = settled(0.002)
    peer.mailbox._trial._judge = judge  # type: ignore[union-attr]
    before = peer.everything()
    peer.give(torch.full((ELEMENTS,), 5.0), donor="liar")
    [said] = peer.cross(0)
    assert said.outcome == "refused"
    assert "rounds can have moved" in said.reason
    assert not asked
    assert peer.everything() == before
    assert [refusal.donor for refusal in peer.refusals] == ["liar"]


def test_beside_it_a_good_one_is_taken() -> None:
    peer = settled(0.002)
    peer.give(torch.full((ELEMENTS,), 5.0), 0, "liar")
    good = peer.give(torch.zeros(ELEMENTS), 1, "honest")
    assert sorted(said.outcome for said in peer.cross(0)) == ["fetched", "refused"]
    assert [refusal.donor for refusal in peer.refusals] == ["liar"]
    assert peer.store.anchor(1) is good.anchor


def test_rounds_that_are_judged_together_are_seen_too() -> None:
    peer = Peer()
    trial, rounds, _ = timed(0.03, 1.0, peer.model.loss, peer)
    rounds([torch.full((ELEMENTS,), 1e-4 * number) for number in range(17)])
    own = peer.store.anchor(0)
    assert not trial._moves.explain(0, own, Anchor(own.values + 5.0, None, own.stamp))
