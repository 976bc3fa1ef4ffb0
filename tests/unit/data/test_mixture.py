"""Several sources: weights, an order that is pure and complete, what is held out, how rows lie."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.data.chat import Example
from atomtrain.data.corpus import HoldOut
from atomtrain.data.examples import Examples, Rows
from atomtrain.data.material import ExampleMaterial, MixedSampler, Mixture, PairMaterial, References
from atomtrain.data.rows import read_rows
from atomtrain.data.sampler import SamplerConfig
from atomtrain.data.weighted import Weighted, check_sources, parse_weighted
from atomtrain.errors import DataError

CONFIG = SamplerConfig(context_tokens=4, sequences=3, seed=5)


def source(count: int, first: int, hold_out: HoldOut = "none") -> ExampleMaterial:
    """Rows whose tokens are their number, from `first` on."""
    made = [Example("text", [n] * 5, [True] * 5, 7) for n in range(first, first + count)]
    return ExampleMaterial(Examples(made, "x", 1, hold_out), packed=False, padding=0)


def mixture(*parts: tuple[int, float]) -> Mixture:
    made = tuple(source(count, 1000 * index) for index, (count, _) in enumerate(parts))
    return Mixture(made, tuple(weight for _, weight in parts))


def drawn(found: Mixture, batches: int, peer: str = "a") -> list[int]:
    sampler = found.sampler(CONFIG, peer)
    return [int(row[0]) for p in range(batches) for row in sampler.batch(p).inputs]


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])),
        min_size=1, max_size=4,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_an_epoch_has_each_source_as_often_as_its_weight_says(
    parts: list[tuple[int, float]],
) -> None:
    sampler = mixture(*parts).sampler(CONFIG, "a")
    size = sampler.draws_per_epoch
    assert size == sum(max(1, round(weight * count)) for count, weight in parts)
    numbers = sampler.take(range(4 * size)).inputs[:, 0].tolist()
    for epoch in range(4):
        seen = Counter(n // 1000 for n in numbers[epoch * size : (epoch + 1) * size])
        expected = {i: max(1, round(w * count)) for i, (count, w) in enumerate(parts)}
        assert dict(seen) == expected
    for index, (count, _) in enumerate(parts):
        own = [n for n in numbers if n // 1000 == index]
        for first in range(0, len(own) - count + 1, count):  # all of it before any of it again
            assert len(set(own[first : first + count])) == count


def test_the_order_is_a_function_of_seed_peer_and_position() -> None:
    parts = (7, 2.0), (20, 0.5)
    whole = drawn(mixture(*parts), 30)
    # Written down, so that no change alters the order of a resumed run unseen.
    assert whole[:8] == EXPECTED
    sampler = mixture(*parts).sampler(CONFIG, "a")
    assert sampler.batch(29).inputs[:, 0].tolist() == whole[-3:]
    assert drawn(mixture(*parts), 30, "b") != whole
    assert sampler.epoch(8) == 1.0


EXPECTED = [5, 1014, 1, 6, 0, 1007, 2, 1015]


def test_one_source_of_weight_one_has_the_order_of_its_own() -> None:
    alone = source(11, 0)
    found = [Mixture((alone,), (1.0,)).sampler(CONFIG, "a").batch(p).inputs for p in range(9)]
    own = alone.sampler(CONFIG, "a")
    assert all(torch.equal(batch, own.batch(p).inputs) for p, batch in enumerate(found))


def test_sequences_of_pairs_stay_together_and_keep_their_references() -> None:
    def pairs(count: int, first: int) -> PairMaterial:
        made = [Example("preference", [n] * 3, [False, True, True], 1) for n in range(2 * count)]
        made = [each._replace(tokens=[first + n for n in each.tokens]) for each in made]
        examples = Examples(made, "pairs", 2, "none")
        said = first + np.arange(2 * count, dtype=np.float32)
        return PairMaterial(examples, 0, References(said, np.empty(0, np.float32)))

    config = SamplerConfig(context_tokens=4, sequences=6, seed=1)
    sampler = Mixture((pairs(5, 0), pairs(3, 100)), (1.0, 2.0)).sampler(config, "a")
    for position in range(5):
        batch = sampler.batch(position)
        first = batch.inputs[:, 0]
        assert torch.equal(first[1::2], first[0::2] + 1)
        assert batch.reference is not None
        assert torch.equal(batch.reference, first.float())


def test_all_sources_are_held_out_in_turns_unless_there_is_a_validation() -> None:
    parts = source(40, 0, "some"), source(40, 1000, "some")
    found = Mixture(parts, (1.0, 3.0))
    held = [batch.inputs[:, 0].tolist() for batch in found.held_out(4, 1, None)]
    assert held == [[10], [1010], [30], [1030]]
    assert len(list(found.held_out(4, 1, 3))) == 3
    assert found.bits_per_byte(4, 1.0) == pytest.approx(5 / (7 * np.log(2)))
    judged = Mixture((source(40, 0), source(40, 1000)), (1.0, 1.0), source(3, 2000, "all"))
    held = [batch.inputs[:, 0].tolist() for batch in judged.held_out(4, 1, None)]
    assert held == [[2000], [2001], [2002]]
    assert judged.sampler(CONFIG, "a").draws_per_epoch == 80


def test_a_source_that_holds_out_too_little_is_passed_over_if_others_do() -> None:
    long = [Example("text", [n] * 9, [False] * 8 + [True], 7) for n in range(20)]
    small = ExampleMaterial(Examples(long, "x"), packed=False, padding=0)
    found = Mixture((small, source(20, 1000, "some")), (1.0, 1.0))
    assert [int(batch.inputs[0, 0]) for batch in found.held_out(4, 1, None)] == [1010]
    with pytest.raises(DataError, match="raise --context"):
        Mixture((small, small), (1.0, 1.0)).held_out(4, 1, None)


def test_how_the_rows_of_all_sources_lie_adds_up() -> None:
    sampler = mixture((7, 1.0), (5, 2.0)).sampler(CONFIG, "a")
    assert isinstance(sampler, MixedSampler)
    assert sampler.laid is not None
    assert sampler.laid[:2] == (12, 12)
    assert sampler.laid.filled_share == 1.0


@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=60))
@settings(deadline=None, max_examples=80)
def test_packing_loses_nothing_and_leaves_no_two_rows_half_empty(lengths: list[int]) -> None:
    made = [Example("text", [n] * c, [True] * c, c) for n, c in enumerate(lengths)]
    rows = Rows(Examples(made, "x", 1, "none").train, 19, packed=True, padding=0)
    assert sorted(n for row in rows.rows for n in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows.rows)
    assert all(sum(lengths[n] for n in row) <= 20 for row in rows.rows)
    assert rows.laid.tokens == sum(lengths)
    # All rows but one are more than half full, or two of them would have been one.
    assert sum(2 * sum(lengths[n] for n in row) <= 20 for row in rows.rows) <= 1


def test_packing_fills_sequences_of_usual_rows_almost_whole() -> None:
    drawn = np.random.default_rng(0).lognormal(4, 0.8, 3000).clip(5, 512).astype(int)
    made = [Example("text", [1] * n, [True] * n, n) for n in map(int, drawn)]
    rows = Rows(Examples(made, "x", 1, "none").train, 512, packed=True, padding=0)
    assert rows.laid.filled_share > 0.99


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.jsonl", Weighted("a.jsonl")),
        ("a.jsonl:2", Weighted("a.jsonl", 2.0)),
        ("a,b.jsonl:0.5", Weighted("a,b.jsonl", 0.5)),
        ("datasets:org/name", Weighted("datasets:org/name")),
        ("datasets:org/name:train", Weighted("datasets:org/name:train")),
        ("datasets:org/name:train[:10]", Weighted("datasets:org/name:train[:10]")),
        ("datasets:org/name:train[:10]:3", Weighted("datasets:org/name:train[:10]", 3.0)),
        ("none:there", Weighted("none:there")),
    ],
)
def test_a_weight_stands_behind_a_source(given: str, expected: Weighted) -> None:
    assert parse_weighted(given) == expected


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e9", "much"])
def test_what_is_not_a_weight_is_refused(weight: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    with pytest.raises(DataError, match=f"the weight '{weight}'; a weight is a number above 0"):
        check_sources([f"{file}:{weight}"], None)
    with pytest.raises(DataError, match=r"none\.txt does not exist"):
        check_sources([f"{file}:2"], "none.txt")
    (tmp_path / "b.txt:7").write_text("x")
    assert parse_weighted(str(tmp_path / "b.txt:7")).weight == 1.0


def test_the_first_row_is_looked_at_before_anything_heavy(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ')
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON"):
        check_sources([str(file)], None)
    file.write_text('{"question": 1}\n')
    check_sources([str(file)], None)  # whoever knows the objective can tell
    with pytest.raises(DataError, match="a row needs messages"):
        check_sources([str(file)], None, conversations=True)
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    check_sources([str(file)], None, conversations=True)


def _rows(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": "a", "completion": f"b {number}"} for number in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def test_what_a_run_is_judged_by_is_not_learnt(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    train, judged = _rows(folder / "train.jsonl"), _rows(folder / "val.jsonl")
    for data in (str(folder), f"{folder}/*.jsonl", f"{train},{judged}", f"{folder}/../chats"):
        with pytest.raises(DataError, match=r"val\.jsonl is among the files of --data"):
            check_sources([data], str(judged))
    with pytest.raises(DataError, match="is among the files of --data datasets:a/b:test"):
        check_sources(["datasets:a/b", "datasets:a/b:test"], "datasets:a/b:test")
    check_sources([str(train)], str(judged))
    check_sources(["datasets:a/b", str(train)], "datasets:a/b:test")


def test_a_file_is_in_one_source(tmp_path: Path) -> None:
    """Each source holds out rows by their places in it, so another one would learn them."""
    folder = tmp_path / "chats"
    one, judged = _rows(folder / "one.jsonl"), _rows(tmp_path / "judged.jsonl")
    with pytest.raises(DataError, match=r"one\.jsonl is in --data .* name it once"):
        check_sources([str(folder), f"{one}:2"], None)
    check_sources([str(folder), f"{one}:2"], str(judged))
    check_sources([f"{one}:2", str(one)], None)


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    one, other = _rows(tmp_path / "one.jsonl"), _rows(tmp_path / "other.jsonl")
    found = [row.place for row in read_rows(f"{other},{tmp_path}/*.jsonl")]
    assert found == [f"{file}:{line}" for file in (other, one) for line in (1, 2, 3)]
