"""What `atom train` is told about the swarm reaches the swarm, and mistakes are told at once."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomtrain.errors import ConfigError
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup.peering import (
    check_rules,
    joined,
    joined_like,
    most_fragments,
    swarm_config,
    with_rules,
)


def _config(**options: Any) -> Any:
    return swarm_config(TrainOptions(**options), "r", "me", None, 12)


def test_defaults_and_choices_become_rules(tmp_path: Path) -> None:
    usual = _config().rules
    assert (usual.wire, usual.mean, usual.local_steps_per_round) == ("float16", "clipped", 12)
    key = tmp_path / "key"
    key.write_text("the secret of this run")
    config = _config(wire="int4", mean="plain", measured_rounds=True, run_key=key)
    chosen = config.rules
    assert (chosen.wire, chosen.mean, chosen.local_steps_per_round) == ("int4", "plain", 0)
    assert chosen.guard.limit == 10.0
    assert config.key_path == key
    assert _config(upload_limit="8Mbit/s").upload_limit_bytes_per_s == 1e6
    assert _config().upload_limit_bytes_per_s == math.inf


def test_means_are_plain_where_all_tokens_have_to_count_alike() -> None:
    assert _config(average="gradient", target_batch_tokens=99).rules.mean == "plain"


def test_how_often_peers_average_is_measured_or_said() -> None:
    def steps(local_steps: int, **options: Any) -> int:
        given = TrainOptions(**options)
        return swarm_config(given, "r", "me", None, local_steps).rules.local_steps_per_round

    assert (steps(0), steps(12), steps(12, measured_rounds=True)) == (0, 12, 0)


def test_measured_rounds_have_few_fragments_that_are_not_too_large() -> None:
    class Sized:
        def __init__(self, *sizes_bytes: int) -> None:
            self._sizes = sizes_bytes

        def fragment_ranges(self) -> list[tuple[int, int]]:
            stops = list(accumulate(self._sizes))
            return list(zip([0, *stops], stops, strict=False))

    small, large = Sized(*[64 << 20] * 9), Sized(*[64 << 20] * 440)
    assert most_fragments(small, 20) == most_fragments(large, 20) == 20  # type: ignore[arg-type]
    assert most_fragments(small, 0) == 4  # type: ignore[arg-type]
    assert most_fragments(large, 0) == 14  # type: ignore[arg-type]


def test_a_founder_who_resumes_need_not_repeat_the_rules() -> None:
    chosen = _config(wire="int4", mean="plain", measured_rounds=True).rules
    again = swarm_config(with_rules(TrainOptions(), asdict(chosen)), "r", "me", None, 12)
    assert again.rules == chosen
    other = with_rules(TrainOptions(wire="float32", local_steps=9), asdict(chosen))
    changed = swarm_config(other, "r", "me", None, 9).rules
    assert (changed.wire, changed.mean, changed.local_steps_per_round) == ("float32", "plain", 9)
    plain = swarm_config(with_rules(TrainOptions(), {}), "r", "me", None, 12)
    assert plain.rules == _config().rules


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"outer": "mode"}, "Did you mean .mean."),
        ({"wire": "int5"}, "Did you mean 'int[48]'"),
        ({"measured_rounds": True, "local_steps": 5}, "contradict"),
        ({"run_key": Path("/nowhere/key")}, "cannot be read"),
        ({"allow": Path("/nowhere/ids")}, "cannot be read"),
        ({"announce": "my machine"}, "--announce takes a host name or an IPv4 address"),
        ({"announce": "203.0.113.7:4001"}, "--announce takes a host name or an IPv4 address"),
        ({"upload_limit": "fast"}, "--upload-limit 'fast' is not a rate"),
        ({"upload_limit": "7kbit/s"}, "at least 8kbit/s"),
        ({"mean": "cliped"}, "Did you mean .clipped."),
        (
            {"mean": "clipped", "average": "gradient", "target_batch_tokens": 9},
            "which is a plain one; leave --mean out",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_prepared(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        TrainOptions(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("joining", "says"),
    [
        ({"wire": "int4"}, "--wire int4 contradicts the run 'r', which has wire float16"),
        ({"local_steps": 7}, "which has local-steps 12 from who started it"),
        ({"measured_rounds": True}, "which has local-steps 12 from who started it"),
        ({"outer": "mean"}, "which has outer nesterov"),
        ({"group_size": 4}, "which has group-size 16"),
        ({"mean": "plain"}, "which has mean clipped"),
        ({"average": "gradient", "target_batch_tokens": 99}, "which has average local"),
    ],
)
def test_who_joins_is_told_that_another_rule_has_no_effect(
    joining: dict[str, Any], says: str
) -> None:
    rules = _config().rules
    with pytest.raises(ConfigError, match=says):
        check_rules(TrainOptions(**joining), rules, "r")


def test_who_joins_may_repeat_the_rules() -> None:
    for options in (
        {},
        {"wire": "int4", "outer": "mean", "group_size": 0, "local_steps": 12},
        {"measured_rounds": True, "mean": "plain"},
        {"average": "gradient", "target_batch_tokens": 99},
    ):
        check_rules(TrainOptions(**options), _config(**options).rules, "r")


def test_outer_update_fits_the_steps_between_rounds() -> None:
    def outer(local_steps: int, fragments: int, **options: Any) -> tuple[float, float]:
        given = TrainOptions(**options)
        rules = swarm_config(given, "r", "me", None, local_steps, fragments).rules
        return rules.outer_learning_rate, rules.outer_momentum

    assert outer(100, 1) == (0.7, 0.9)
    assert outer(500, 4) == (0.4, 0.9)
    assert outer(20, 4) == outer(500, 4, measured_rounds=True) == (0.5, 0.5)
    assert outer(100, 1, outer="mean") == (1.0, 0.0)
    before = {"outer_momentum": 0.0, "outer_learning_rate": 1.0}
    assert with_rules(TrainOptions(), before).outer == "mean"
    assert with_rules(TrainOptions(outer="nesterov"), before).outer == "nesterov"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 14))
def test_neighbours_are_joined_until_there_are_few_enough(sizes: list[int], most: int) -> None:
    runs = joined(sizes, most)
    assert len(runs) <= max(1, most)
    assert [i for first, last in runs for i in range(first, last)] == list(range(len(sizes)))
    assert all(last > first for first, last in runs)
    like = [sum(sizes[first:last]) for first, last in runs]
    assert joined_like(sizes, like) == runs
    assert joined_like(sizes, [*like, 1]) is None
    assert joined_like(sizes, [like[0] + 1, *like[1:]]) is None
