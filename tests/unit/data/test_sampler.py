"""The sample order: pure, complete, independent between peers, and the fixed held-out batches."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.data.sampler import (
    Batch,
    Images,
    Sampler,
    SamplerConfig,
    held_out_batches,
    joined,
)
from atomtrain.errors import DataError
from tests.support.waiting import PATIENCE_S

# Token i is the number i: a batch then shows where it was taken from.
TOKENS = np.arange(1000, dtype=np.uint16)
# Written down, so that no change of library or code alters the order of a resumed run unseen.
EXPECTED_FIRST = [643, 923, 693, 793, 953, 453, 363, 583]


def sampler(
    peer: str = "a", *, seed: int = 0, context: int = 10, sequences: int = 4, count: int = 1000
) -> Sampler:
    config = SamplerConfig(context_tokens=context, sequences=sequences, seed=seed)
    return Sampler(TOKENS[:count], config, peer)


def starts(drawn: Sampler, first: int, last: int) -> list[int]:
    """First tokens of all sequences of batches `first` to `last - 1`."""
    return [int(row[0]) for p in range(first, last) for row in drawn.batch(p).inputs]


def test_shapes_types_and_labels() -> None:
    batch = sampler().batch(3)
    inputs, labels = batch.inputs, batch.labels
    assert inputs.shape == labels.shape == (4, 10)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, inputs + 1), "the label is the next token"
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))


@given(
    count=st.integers(2, 300),
    context=st.integers(1, 40),
    sequences=st.integers(1, 7),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=150)
def test_each_epoch_visits_every_window_once(
    count: int, context: int, sequences: int, seed: int
) -> None:
    if count < context + 1:
        with pytest.raises(DataError):
            sampler(count=count, context=context)
        return
    drawn = sampler(seed=seed, context=context, sequences=sequences, count=count)
    windows = drawn.draws_per_epoch
    batches = -(-3 * windows // sequences)
    found = starts(drawn, 0, batches)
    for epoch in range(3):
        visited = sorted(found[epoch * windows : (epoch + 1) * windows])
        assert 0 <= visited[0] < context, "the grid is shifted by less than a context"
        assert visited[-1] + context < count, "the last label exists"
        assert visited == [visited[0] + index * context for index in range(windows)]


def test_batches_are_the_same_in_any_order_and_after_resuming() -> None:
    whole = [sampler().batch(position) for position in range(60)]
    backwards = sampler()
    for position in reversed(range(60)):
        assert torch.equal(backwards.batch(position).inputs, whole[position].inputs)
    resumed = sampler()
    for position in range(37, 60):
        assert torch.equal(resumed.batch(position).inputs, whole[position].inputs)


@pytest.mark.slow
def test_the_order_is_the_same_in_another_process_and_for_ever() -> None:
    assert starts(sampler(), 0, 2) == EXPECTED_FIRST
    code = (
        "import numpy as np; from atomtrain.data.sampler import Sampler, SamplerConfig;"
        "s = Sampler(np.arange(1000), SamplerConfig(context_tokens=10, sequences=4), 'a');"
        "print([int(r[0]) for p in range(2) for r in s.batch(p).inputs])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == str(EXPECTED_FIRST)


def test_peers_seeds_and_epochs_have_orders_of_their_own() -> None:
    windows = sampler().draws_per_epoch
    assert windows == 99
    orders = {
        "a": starts(sampler("a"), 0, 24),
        "b": starts(sampler("b"), 0, 24),
        "seed": starts(sampler("a", seed=1), 0, 24),
        "epoch": starts(sampler("a"), 25, 49),
    }
    for name, order in orders.items():
        for other, compared in orders.items():
            same = sum(one == two for one, two in zip(order, compared, strict=True))
            assert same < 10 or name == other, f"{name} and {other} agree in {same} of 96"


def test_the_grid_moves_between_epochs() -> None:
    drawn = sampler()
    offsets = {
        starts(drawn, epoch * 99 // 4 + 1, epoch * 99 // 4 + 2)[0] % 10 for epoch in range(30)
    }
    assert len(offsets) >= 6


def test_all_tokens_are_trained_on_in_the_long_run() -> None:
    drawn = sampler(sequences=99)
    seen = {int(token) for p in range(60) for token in drawn.batch(p).inputs.flatten()}
    assert len(seen) >= 995


def test_epoch_counts_visits_of_the_text() -> None:
    drawn = sampler(sequences=33)
    assert [drawn.epoch(position) for position in (0, 3, 6)] == [0.0, 1.0, 2.0]


def test_batches_larger_than_the_text_span_epochs() -> None:
    drawn = sampler(sequences=10, count=31)
    assert drawn.draws_per_epoch == 2
    assert drawn.batch(0).inputs.shape == (10, 10)


def test_too_short_a_text_is_refused_with_numbers() -> None:
    with pytest.raises(DataError, match=r"training text has 10 tokens, a context of 10 .* 11"):
        sampler(count=10)
    with pytest.raises(DataError, match=r"held-out text has 10 tokens, a context of 10 .* 11"):
        held_out_batches(TOKENS[:10], 10, 1)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="both must be 1 or more"):
        SamplerConfig(context_tokens=0, sequences=1)
    with pytest.raises(DataError, match="both must be 1 or more"):
        held_out_batches(TOKENS, 10, 0)
    with pytest.raises(DataError, match="limit=0"):
        held_out_batches(TOKENS, 10, 1, limit=0)
    with pytest.raises(DataError, match="position -1"):
        sampler().batch(-1)


@given(
    count=st.integers(11, 400),
    sequences=st.integers(1, 9),
    limit=st.none() | st.integers(1, 5),
)
@settings(deadline=None, max_examples=100)
def test_held_out_batches_are_full_fixed_and_within_the_text(
    count: int, sequences: int, limit: int | None
) -> None:
    found = list(held_out_batches(TOKENS[:count], 10, sequences, limit))
    again = list(held_out_batches(TOKENS[:count], 10, sequences, limit))
    assert 1 <= len(found) <= (limit or count)
    firsts: list[int] = []
    for batch, same in zip(found, again, strict=True):
        assert batch.inputs.shape == (sequences, 10)
        assert torch.equal(batch.labels, batch.inputs + 1)
        assert torch.equal(batch.inputs, same.inputs)
        assert int(batch.labels.max()) < count
        firsts += [int(row[0]) for row in batch.inputs]
    if (count - 1) // 10 >= sequences:
        assert all(later - first >= 10 for first, later in itertools.pairwise(firsts))


def test_held_out_batches_are_spread_over_all_of_the_text() -> None:
    (batch,) = held_out_batches(TOKENS, 10, 4, limit=1)
    assert [int(row[0]) for row in batch.inputs] == [0, 329, 659, 989]


def test_images_of_rows_are_picked_joined_and_padded() -> None:
    rows = [
        {"pixel_values": torch.full((count, side), float(count)), "sizes": torch.tensor([[side]])}
        for count, side in ((1, 3), (2, 2), (1, 1))
    ]
    inputs = torch.arange(3)[:, None]
    batch = Batch(inputs, inputs, images=Images(rows))
    picked = [batch.part(slice(1, 3)), batch.part(torch.tensor([2, 0]))]
    whole = joined(picked)
    assert whole.images is not None
    assert whole.inputs.flatten().tolist() == [1, 2, 2, 0]
    found = whole.images.together()
    assert found["sizes"].tolist() == [[2], [1], [1], [3]]
    assert found["pixel_values"].tolist() == [
        [2, 2, 0], [2, 2, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]
    ]  # fmt: skip


def test_images_of_one_row_are_not_copied() -> None:
    pixels = torch.ones(2, 3)
    assert Images([{"pixel_values": pixels}]).together()["pixel_values"] is pixels
