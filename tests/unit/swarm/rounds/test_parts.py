"""The swarm's small parts: slices, codecs, outer update, reduction, agenda, timing, anchors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.errors import ConfigError, SwarmError
from atomtrain.swarm.anchors.anchor_store import AnchorStore
from atomtrain.swarm.anchors.anchors import (
    OLD_HASH,
    Anchor,
    Merge,
    Origin,
    Part,
    digest_of,
    whole,
)
from atomtrain.swarm.anchors.buffer_pool import (
    BufferPool,
    exchange_memory,
    pooled_copy,
    pooled_empty,
)
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.anchors.updates import DROPPED, OuterUpdate
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.codecs.slices import Span, piece_spans, slice_spans, slices_per_member
from atomtrain.swarm.membership.agenda import Agenda, lead_order
from atomtrain.swarm.membership.config import Manifest
from atomtrain.swarm.membership.deadlines import RoundTiming
from atomtrain.swarm.rounds.owning import SliceReduction
from atomtrain.swarm.rounds.round_member import Doubt, merge_of_fetched
from tests.support.swarm_configs import swarm_config


@given(st.integers(0, 5000), st.integers(1, 40))
def test_slices_cover_the_fragment_once(elements: int, members: int) -> None:
    spans = slice_spans(elements, members)
    assert len(spans) == members
    assert [i for span in spans for i in range(*span)] == list(range(elements))
    assert max(s.elements for s in spans) - min(s.elements for s in spans) <= 1


def test_large_fragments_have_several_slices_for_each_member() -> None:
    large = 100 << 19
    assert [slices_per_member(large, members) for members in (1, 4, 10, 3000)] == [100, 25, 10, 1]
    assert slices_per_member(1 << 40, 8) == 256, "a decision names 2048 slices at most"
    assert slices_per_member(1000, 2) == 1


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 64))
def test_pieces_cover_the_span_once(start: int, length: int, size: int) -> None:
    pieces = piece_spans(Span(start, start + length), size)
    assert [i for piece in pieces for i in range(*piece)] == list(range(start, start + length))


def test_outer_update_is_torchs_nesterov() -> None:
    torch.manual_seed(0)
    anchor = torch.randn(100)
    parameter = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    velocity = torch.zeros(100)
    for _ in range(20):
        change = torch.randn(100)
        OuterUpdate(learning_rate=0.7, momentum=0.9).apply(anchor, change, velocity)
        parameter.grad = -change
        optimizer.step()
    torch.testing.assert_close(anchor, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_late_contributions_neither_feed_nor_release_momentum() -> None:
    outer = OuterUpdate(learning_rate=0.5, momentum=0.5)
    mean, velocity = torch.tensor([2.0]), torch.tensor([4.0])
    anchor, kept = torch.tensor([1.0]), velocity.clone()
    outer.apply(anchor, mean, kept, 0.0)
    assert (anchor.item(), kept.item()) == (2.0, 4.0)
    anchor, kept = torch.tensor([1.0]), velocity.clone()
    outer.apply(anchor, mean, kept, 0.5)
    assert kept.item() == 4.0 * 0.75 + 1.0
    assert anchor.item() == 1.0 + 0.5 * (2.0 + 0.25 * 4.0)


def test_the_step_after_momentum_was_dropped_is_a_plain_one() -> None:
    outer = OuterUpdate(learning_rate=0.5, momentum=0.5)
    anchor, mean = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    velocity = torch.tensor([DROPPED, 0.0, 2.0])
    outer.apply(anchor, mean, velocity)
    assert anchor.tolist() == [0.5, 0.75, 1.0]
    assert velocity.tolist() == [0.0, 1.0, 2.0]
    assert not velocity.signbit().any(), "the one after it is as any other"
    outer.apply(anchor, torch.zeros(3), velocity)
    assert anchor.tolist() == [0.5, 0.875, 1.25]


def test_plain_outer_update_lands_on_the_mean_exactly() -> None:
    anchor = torch.tensor([1.0, -2.0])
    OuterUpdate().apply(anchor, torch.tensor([0.5, 0.25]), None)
    assert anchor.tolist() == [1.5, -1.75]


@given(st.data())
def test_mean_is_over_exactly_those_that_count(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    reduction = SliceReduction(4, weights)
    counted = []
    for member in data.draw(st.permutations(range(len(weights)))):
        fate = data.draw(st.sampled_from(["adds", "lost", "not finite", "wrong size", "silent"]))
        values = torch.full((4,), float(member + 1))
        if fate == "lost":
            reduction.lose(member)
        elif fate == "not finite":
            assert not reduction.add(member, values * float("nan"))
        elif fate == "wrong size":
            assert not reduction.add(member, values[:3])
        elif fate == "adds" and reduction.add(member, values):
            counted.append(member)
            assert not reduction.add(member, values), "nobody counts twice"
    contributors, mean = reduction.close()
    assert contributors == tuple(sorted(counted))
    assert all(weights[member] > 0 for member in counted)
    assert reduction.complete
    assert not reduction.add(0, torch.ones(4)), "too late"
    if mean is None:
        assert not counted
    else:
        total = sum(weights[m] for m in counted)
        expected = sum(weights[m] * (m + 1) for m in counted) / total
        torch.testing.assert_close(mean, torch.full((4,), expected), rtol=1e-5, atol=0)


def test_everybody_leads_sometimes_and_all_agree_who() -> None:
    peers = ["p", "q", "r", "s"]
    firsts = {lead_order("run", r, peers)[0] for r in range(100)}
    assert firsts == set(peers)
    assert lead_order("run", 7, reversed(peers)) == lead_order("run", 7, peers)
    order = lead_order("run", 7, peers)
    assert lead_order("run", 7, order[1:]) == order[1:], "without its leader the next leads"


def test_agenda_accepts_one_round_at_a_time_and_never_an_old_one() -> None:
    agenda = Agenda(fragments=3, local_steps_per_round=6)
    assert not agenda.due(0.0)
    agenda.add_steps(1)
    assert not agenda.due(0.0)
    agenda.add_steps(1)
    assert agenda.due(0.0)
    assert agenda.propose_to(["a", "b"], 0.0, retry_s=5.0) == "a"
    assert not agenda.due(4.9)
    assert agenda.due(5.0)
    assert agenda.propose_to(["a", "b"], 5.0, retry_s=5.0) == "b", "the first did not invite"
    agenda.begin(4, "4-x")
    assert "busy" in agenda.refusal(4)
    assert "busy" in agenda.refusal(5)
    agenda.end(4)
    assert "over" in agenda.refusal(4)
    assert agenda.refusal(5) == ""
    assert agenda.fragment(5) == 2


def test_agenda_in_haste_needs_no_steps_but_one_round_at_a_time() -> None:
    agenda = Agenda(fragments=3, local_steps_per_round=600)
    assert not agenda.due(0.0)
    agenda.hasten()
    assert agenda.due(0.0)
    agenda.begin(0, "0-x")
    assert not agenda.due(0.0), "one is under way"
    agenda.end(0)
    assert agenda.due(0.0)


def test_measured_pace_is_the_fewest_steps_that_leave_a_fifth_of_the_time() -> None:
    agenda = Agenda(fragments=3, local_steps_per_round=0)
    assert agenda.steps_per_fragment == 10, "until something is measured"
    agenda.pace(0.0, 0.5)
    assert agenda.steps_per_fragment == 10
    agenda.pace(4.0, 0.5)
    assert agenda.steps_per_fragment == 10
    agenda.pace(4.1, 0.5)
    assert agenda.steps_per_fragment == 11
    agenda.pace(0.001, 0.5)
    assert agenda.steps_per_fragment == 1
    agenda.pace(1e6, 0.5)
    assert agenda.steps_per_fragment == 500 // 3
    fixed = Agenda(fragments=3, local_steps_per_round=6)
    fixed.pace(1e6, 0.5)
    assert fixed.steps_per_fragment == 2


def test_one_slow_round_does_not_change_the_pace() -> None:
    timing = RoundTiming(floor_s=lambda: 5.0, ceiling_s=100.0, slowest_bytes_per_s=1e6)
    timing.observe_round(1.0)
    assert timing.round_s == 0.0
    timing.observe_round(60.0)
    assert timing.round_s == 1.0
    timing.observe_round(2.0)
    assert timing.round_s == 2.0


def test_deadlines_follow_measurements_between_floor_and_ceiling() -> None:
    timing = RoundTiming(floor_s=lambda: 5.0, ceiling_s=100.0, slowest_bytes_per_s=1e6)
    assert timing.answer_s([]) == 5.0
    assert timing.answer_s([1.0, 10.0]) == 25.0
    assert timing.exchange_s(10**7) == 45.0
    timing.observe(10**7, 1.0)
    assert timing.exchange_s(10**7) == pytest.approx(9.0)
    timing.failed()
    assert timing.exchange_s(10**7) == pytest.approx(13.0), "twice as patient"
    assert timing.exchange_s(10**12) == 100.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.text("ab", max_size=2))))
def test_stamps_are_totally_ordered(triples: list[tuple[int, int, str]]) -> None:
    stamps = {Stamp(*triple) for triple in triples}
    for a in stamps:
        assert not a.beats(a)
        assert all(a.beats(b) != b.beats(a) for b in stamps if b != a)
    assert not stamps or sum(not any(b.beats(a) for b in stamps) for a in stamps) == 1


class _Access:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.values


def _anchor(values: torch.Tensor, version: int, origin: Origin) -> Anchor:
    return Anchor(values, None, Stamp(version, 0, digest_of(values, None)), origin)


def test_merge_keeps_progress_since_the_snapshot_and_what_was_left_out() -> None:
    local = torch.tensor([0.0, 0.0, 0.0])
    store = AnchorStore((3,), momentum=False)
    store.adopt_local(_Access(local))
    store.tokens_seen = 40
    local += torch.tensor([1.0, 2.0, 3.0])
    snapshot = store.snapshot(0, local, torch.empty_like(local))
    assert snapshot.weight == 40
    store.tokens_seen = 50
    local += 0.5
    # Slice 0 has our contribution; slice 1 was averaged without us; slice 2 not at all.
    new = _anchor(torch.tensor([10.0, 20.0, 0.0]), 1, Origin("r", ()))
    store.merge(Merge(0, new, (Span(1, 2),), snapshot, (Span(0, 1),)), local)
    assert local.tolist() == [10.5, 22.5, 3.5]
    assert store.anchor(0) is new
    assert store.snapshot(0, local, torch.empty_like(local)).weight == 10


def test_fetched_anchor_of_an_unheard_decision_does_not_count_twice() -> None:
    local = torch.zeros(2)
    store = AnchorStore((2,), momentum=False)
    store.adopt_local(_Access(local))
    local += 1.0
    snapshot = store.snapshot(0, local, torch.empty_like(local))
    doubt = Doubt("r", snapshot, ("me", "you"))
    local += 0.25
    parts = (Part(Span(0, 1), frozenset({"me", "you"})), Part(Span(1, 2), frozenset({"you"})))
    new = _anchor(torch.tensor([4.0, 8.0]), 1, Origin("r", parts))
    merge = merge_of_fetched(0, new, store.anchor(0), doubt, "me")
    store.merge(merge, local)
    assert local.tolist() == [4.25, 9.25]
    later = _anchor(torch.tensor([5.0, 9.0]), 2, Origin("r2", ()))
    merge = merge_of_fetched(0, later, store.anchor(0), doubt, "me")
    assert merge == Merge(0, later, whole(2))
    store.merge(merge, local)
    assert local.tolist() == [5.25, 10.25]


def test_a_change_across_an_anchor_made_without_it_is_late() -> None:
    local = torch.zeros(2)
    store = AnchorStore((2,), momentum=False)
    store.adopt_local(_Access(local))
    local += 1.0
    assert not store.snapshot(0, local, torch.empty(2)).late
    store.merge(Merge(0, _anchor(torch.ones(2), 1, Origin("r", ())), whole(2)), local)
    late = store.snapshot(0, local, torch.empty(2))
    assert late.late
    new = _anchor(torch.full((2,), 3.0), 2, Origin("r2", ()))
    store.merge(Merge(0, new, (), late, whole(2)), local)
    assert not store.snapshot(0, local, torch.empty(2)).late


def test_overlap_weight_holds_back_progress_and_loses_none() -> None:
    local = torch.zeros(3)
    store = AnchorStore((3,), momentum=False, overlap_weight=0.25)
    store.adopt_local(_Access(local))
    local += 1.0
    snapshot = store.snapshot(0, local, torch.empty(3))
    local += torch.tensor([4.0, 8.0, 0.0])
    new = _anchor(torch.full((3,), 10.0), 1, Origin("r", ()))
    store.merge(Merge(0, new, (), snapshot, whole(3)), local)
    assert local.tolist() == [11.0, 12.0, 10.0]
    residual = store.residual(0)
    assert residual is not None
    assert residual.tolist() == [3.0, 6.0, 0.0]
    assert store.snapshot(0, local, torch.empty(3)).contribution(Span(0, 3)).tolist() == [4, 8, 0]


def test_store_survives_a_checkpoint_and_notices_damage() -> None:
    store = AnchorStore((3,), momentum=True)
    store.adopt_local(_Access(torch.tensor([1.0, 2.0, 3.0])))
    store.tokens_seen = 30
    tensors = {name: t.clone() for name, t in store.tensors().items()}
    fresh = AnchorStore((3,), momentum=True)
    fresh.load(tensors, store.meta())
    assert fresh.stamps() == store.stamps()
    assert fresh.snapshot(0, torch.zeros(3), torch.empty(3)).weight == 30
    tensors["anchor.0"][1] += 1
    with pytest.raises(SwarmError, match="damaged"):
        fresh.load(tensors, store.meta())
    tensors["anchor.0"][1] -= 1
    plain = AnchorStore((3,), momentum=False)  # the founder resumed with another outer update
    plain.load(tensors, store.meta())
    again = AnchorStore((3,), momentum=True)
    again.load(plain.tensors(), plain.meta())
    assert again.stamps() == store.stamps()
    with pytest.raises(SwarmError, match="other fragments"):
        AnchorStore((4,), momentum=True).load(tensors, store.meta())


def test_manifest_round_trip_and_limits() -> None:
    manifest = Manifest("run", (3, 5), {"model": {"layers": 2}})
    assert Manifest.decode(manifest.encode()) == manifest
    with pytest.raises(SwarmError, match="not JSON"):
        Manifest("run", (3,), {"bad": object()}).encode()
    for sizes in ((), (0,), (-1,), (1 << 41,)):
        with pytest.raises(SwarmError, match="fragments"):
            Manifest("run", sizes)


@given(st.binary(max_size=200))
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(SwarmError):
        Manifest.decode(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "a b"), ("run", ""), ("listen_port", 70000), ("outer_momentum", 1.0),
     ("local_steps_per_round", -1), ("wire", "int5"), ("expiry_s", 0.1), ("stall_s", 0.0),
     ("upload_limit_bytes_per_s", 999.0), ("upload_limit_bytes_per_s", float("nan"))],
)  # fmt: skip
def test_config_says_which_field_is_wrong(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=repr(value).replace(".", r"\.")):
        swarm_config(**{"run": "ok", field: value})  # type: ignore[arg-type]


def test_a_checkpoint_whose_hash_is_the_old_one_is_taken_and_checked() -> None:
    store = AnchorStore((3,), momentum=0)
    store.adopt_local(_Access(torch.tensor([1.0, 2.0, 3.0])))
    old = digest_of(store.anchor(0).values, None, OLD_HASH)
    meta = {**store.meta(), "digests": [old]}
    del meta["hash"]
    again = AnchorStore((3,), momentum=0)
    again.load(store.tensors(), meta)
    assert again.stamps() == store.stamps(), "with the hash that peers agree on now"
    with pytest.raises(SwarmError, match="damaged"):
        again.load({"anchor.0": torch.zeros(3)}, meta)


@pytest.mark.parametrize("elements", [0, 3, 1 << 20, (1 << 20) + 5])
def test_large_memory_holds_what_is_written(elements: int) -> None:
    values = pooled_empty(elements)
    assert (values.dtype, values.shape) == (torch.float32, (elements,))
    values.copy_(torch.arange(elements))
    assert pooled_copy(values).sum(dtype=torch.float64) == elements * (elements - 1) / 2


def test_memory_serves_again_when_nothing_refers_to_it() -> None:
    pool, size = BufferPool(), (1 << 20) + 7
    first = pool.empty(size)
    place = first.data_ptr()
    held = byte_view(first.view(torch.uint8)[5:9])
    del first
    assert pool.empty(size).data_ptr() != place, "a view of it is still in use"
    del held
    again = {pool.empty(size).data_ptr(), pool.empty(size - 3).data_ptr()}
    assert place in again, "also for what is a little smaller"
    assert pool.empty(0).shape == (0,)


def test_memory_of_another_size_is_given_back() -> None:
    pool = BufferPool(one_size=True)
    held = pool.empty(1 << 20)
    assert pool.kept_bytes == 0
    del held
    assert pool.kept_bytes == 1 << 20
    pool.empty(2 << 20)
    assert pool.kept_bytes == 2 << 20


def test_an_exchange_gets_the_memory_of_the_last_one_like_it() -> None:
    first = exchange_memory("one")
    first.empty(1 << 20)  # and nobody refers to it any more
    assert exchange_memory("one").kept_bytes == 1 << 20
    assert exchange_memory("another").kept_bytes == 0
    assert exchange_memory("one") is not first, "that of another kind was given back"


def test_a_mean_lies_where_it_is_wanted() -> None:
    reduction = SliceReduction(2, [1, 3])
    first, second = torch.tensor([4.0, 8.0]), torch.tensor([8.0, 4.0])
    reduction.add(0, first)
    reduction.add(1, second)
    out = torch.empty(2)
    counted, mean = reduction.close(out)
    assert counted == (0, 1)
    assert mean is out
    assert out.tolist() == [7.0, 5.0]
    assert first.tolist() == [4.0, 8.0], "contributions stay as they are"
