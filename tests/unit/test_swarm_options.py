"""What `atom train` is told about the swarm reaches the swarm, and mistakes are told at once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import ConfigError
from atomtrain.swarm import Rules
from atomtrain.training.options import TrainOptions
from atomtrain.training.peering import swarm_config, with_rules


def _config(**options: Any) -> Any:
    return swarm_config(TrainOptions(**options), "r", "me", None, 12)


def test_defaults_and_choices_become_rules(tmp_path: Path) -> None:
    plain = Rules.of(_config())
    assert (plain.wire, plain.mean, plain.local_steps_per_round) == ("float16", "plain", 12)
    key = tmp_path / "key"
    key.write_text("the secret of this run")
    config = _config(wire="int4", clipped_mean=True, measured_rounds=True, run_key=key)
    chosen = Rules.of(config)
    assert (chosen.wire, chosen.mean, chosen.local_steps_per_round) == ("int4", "clipped", 0)
    assert chosen.guard.limit == 10.0
    assert config.key_path == key


def test_a_founder_who_resumes_need_not_repeat_the_rules() -> None:
    chosen = Rules.of(_config(wire="int4", clipped_mean=True, measured_rounds=True))
    again = swarm_config(with_rules(TrainOptions(), asdict(chosen)), "r", "me", None, 12)
    assert Rules.of(again) == chosen
    other = with_rules(TrainOptions(wire="float32", local_steps=9), asdict(chosen))
    changed = Rules.of(swarm_config(other, "r", "me", None, 9))
    assert (changed.wire, changed.mean, changed.local_steps_per_round) == ("float32", "clipped", 9)
    assert Rules.of(swarm_config(with_rules(TrainOptions(), {}), "r", "me", None, 12)) == Rules.of(
        _config()
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wire": "int5"}, "Did you mean 'int[48]'"),
        ({"measured_rounds": True, "local_steps": 5}, "contradict"),
        ({"run_key": Path("/nowhere/key")}, "cannot be read"),
        ({"allow": Path("/nowhere/ids")}, "cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_is_prepared(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        TrainOptions(**options)
    assert "\n" not in str(caught.value)
