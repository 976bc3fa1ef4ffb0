"""The witness of the means accepts what is right, to rounding, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atombench.churn.witness import (
    Note,
    Slice,
    check_means,
    note_of,
    positions,
    read_notes,
)
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Origin, Snapshot, whole
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.codecs.slices import Span

ELEMENTS = 1000
HALVES = (Span(0, 500), Span(500, ELEMENTS))
STAMP = Stamp(3, 100, "")


def change(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 1e-3


def note(
    me: str,
    contribution: torch.Tensor,
    applied: torch.Tensor,
    weights: dict[str, int],
    shares: tuple[float, ...] = (),
) -> Note:
    """Make a merge in which all peers of `weights` are in both halves, and note it.

    The first two peers own a half each, and say to others that contributions count as in `shares`.
    """
    old = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    present = Anchor(old, None, STAMP)
    snapshot = Snapshot(0, old + contribution, present, weights["a"], 0)
    slices = [
        Slice(*span, tuple(weights), None if me == owner else shares)
        for span, owner in zip(HALVES, weights, strict=False)
    ]
    made = Anchor(old + applied, None, STAMP, Origin("round", ()))
    merge = Merge(0, made, (), snapshot, whole(ELEMENTS))
    report = RoundReport(0, 0, 4, "averaged", tuple(weights), tuple(weights.values()))
    noted = note_of(merge, report, slices)
    assert noted is not None
    return noted


def of_two(applied: torch.Tensor) -> list[tuple[str, Any]]:
    weights = {"a": 512, "b": 1536}
    return [
        (peer, note(peer, change(seed), applied, weights)) for peer, seed in (("a", 1), ("b", 2))
    ]


def of_three(applied: torch.Tensor, shares: tuple[float, ...]) -> list[tuple[str, Any]]:
    weights = {"a": 512, "b": 512, "c": 512}
    return [
        (peer, note(peer, change(seed), applied, weights, shares))
        for seed, peer in enumerate(weights, 1)
    ]


def weighted(*shares: float) -> torch.Tensor:
    return torch.stack([share * change(seed) for seed, share in enumerate(shares, 1)]).sum(0)


RIGHT = 0.25 * change(1) + 0.75 * change(2)


def test_the_weighted_mean_is_right_as_float16_too() -> None:
    assert check_means(of_two(RIGHT)) == (4, 0, 0, 0)
    scale = RIGHT.abs().amax()
    assert check_means(of_two((RIGHT / scale).half().float() * scale)) == (4, 0, 0, 0)


@pytest.mark.parametrize(
    "applied",
    [
        0.5 * change(1) + 0.5 * change(2),
        change(1) + change(2),
        change(1),
        0.75 * change(1) + 0.25 * change(2),
        torch.zeros(ELEMENTS),
    ],
    ids=["weights ignored", "sum", "one of them only", "weights exchanged", "nothing"],
)
def test_anything_else_is_wrong(applied: torch.Tensor) -> None:
    assert check_means(of_two(applied)) == (0, 0, 4, 0)


def test_a_clipped_mean_is_judged_by_what_its_owner_says_that_each_counts() -> None:
    clipped = (0.4, 0.4, 0.2)
    assert check_means(of_three(weighted(*clipped), clipped)) == (6, 6, 0, 0)
    assert check_means(of_three(weighted(1 / 3, 1 / 3, 1 / 3), clipped)) == (0, 0, 6, 0)
    assert check_means(of_three(weighted(*clipped), ())) == (0, 0, 6, 0)


def test_an_owner_may_not_say_anything() -> None:
    for shares in ((0.9, 0.05, 0.05), (0.1, 0.1, 0.1), (0.6, 0.6, -0.2)):
        assert check_means(of_three(weighted(*shares), shares)) == (0, 0, 6, 0)


def test_an_owner_says_the_same_to_all() -> None:
    right = (0.4, 0.4, 0.2)
    notes = of_three(weighted(*right), right)
    notes[2][1]["slices"][0] = Slice(0, 500, ("a", "b", "c"), ())
    assert check_means(notes) == (3, 3, 3, 0)


def test_what_only_its_owner_has_noted_is_not_judged() -> None:
    [(peer, alone), _, _] = of_three(weighted(1.0, 0.0, 0.0), ())
    alone["slices"] = [Slice(0, 500, ("a",), None)]
    assert check_means([(peer, alone)]) == (0, 0, 0, 1)


def test_each_slice_is_judged_alone() -> None:
    half = RIGHT.clone()
    half[500:] *= 1.1
    assert check_means(of_two(half)) == (2, 0, 2, 0)


def test_without_a_contributors_note_nothing_is_said() -> None:
    assert check_means(of_two(RIGHT)[:1]) == (0, 0, 0, 2)


def test_what_is_not_a_round_of_several_is_not_noted() -> None:
    present = Anchor(torch.zeros(3), None, STAMP)
    merge = Merge(0, present, whole(3))
    assert note_of(merge, RoundReport(0, 0, 1, "fetched"), []) is None


def test_small_fragments_are_noted_in_full() -> None:
    assert positions(5).tolist() == [0, 1, 2, 3, 4]
    assert len(set(positions(ELEMENTS).tolist())) == 256


def test_a_note_cut_short_is_left_out(tmp_path: Any) -> None:
    (tmp_path / "notes").write_text('{"a": 1}\n{"b": ')
    assert read_notes(tmp_path / "notes") == [{"a": 1}]
    assert read_notes(tmp_path / "none") == []
