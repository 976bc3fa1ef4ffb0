"""The rules of averaging: set by who starts a run, the same for all its peers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atomtrain.errors import ConfigError, choices
from atomtrain.settings import MOST_TOKENS, check_fields, count, one_of, option
from atomtrain.swarm.codecs.names import FLOAT16, check_codec_name

if TYPE_CHECKING:
    from atomtrain.swarm.anchors.updates import OuterUpdate
    from atomtrain.swarm.membership.guards import Guard

MEASURED = 0
"""Local steps per round that stand for: as measurements say."""
GROUP_SIZE = 16
"""Members of a round at most, unless the run's founder says something else. See `agenda`."""
GROUP_SIZE_MIN = 3
"""Below, guards have nothing to judge by, and an odd peer out would have nobody."""
AVERAGES = ("local", "gradient")
"""What rounds average, the default first: changes of local steps, or gradients."""
MEANS = ("clipped", "plain")
"""How contributions are averaged, the default first; see `Guard`."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all peers of a run must do alike for their anchors to stay equal bit for bit.

    Fields with a help text are options of `atom train`: who joins may repeat what the run has.
    `zero` is what a rule of 0 is called.
    """

    local_steps_per_round: int = option(
        30,
        "Steps in which every part of the model is averaged with the other peers once; fewer learn "
        "more and send more. Set by who starts the run. Default: as few as the link allows, by how "
        "long rounds and steps are seen to take.",
        "N",
        check=count(),
        zero="as measured",
    )
    outer_learning_rate: float = 1.0
    """Factor on a round's mean change; above 0, at most 2. See `OuterUpdate`."""
    outer_momentum: float = 0.0
    """Nesterov momentum of the outer update; at least 0, below 1."""
    overlap_weight: float = 1.0
    """Share of what is learnt while a round goes on that a merge leaves in the parameters; the rest
    comes back with the next anchor. 0 to 1. See `AnchorStore`."""
    wire: str = option(
        FLOAT16,
        "How changes travel between peers: float32, float16, int8, int4 or topk; set by who starts "
        "the run. Default: float16.",
        "FORMAT",
        check=check_codec_name,
    )
    average: str = option(
        AVERAGES[0],
        "What peers average: local (the change of --local-steps steps, in the background) or "
        "gradient (all gather a batch of --target-batch-tokens, then step together); set by who "
        "starts the run. Default: local.",
        "WAY",
        check=one_of(AVERAGES),
    )
    target_batch_tokens: int = option(
        0,
        "With --average gradient: tokens of all peers together in one step.",
        "N",
        check=count(most=MOST_TOKENS),
        zero="none",
    )
    group_size: int = option(
        None,
        "Members of a round at most: more peers are shuffled into several groups for each round. "
        "0: one group of all. Set by who starts the run. Default: 16, or 0 with --average "
        "gradient.",
        "N",
    )
    norm_limit: float = 10.0
    """Contributions above this multiple of the group's median norm are rejected; 0 (none is), or
    at least 2. See `Guard`."""
    mean: str = option(
        None,
        "How a round averages: clipped (what is far from the others is limited, and a member "
        "weighs at most 1.25 times the median) or plain; set by who starts the run. Default: "
        "clipped, or plain with --average gradient.",
        "HOW",
    )

    def __post_init__(self) -> None:
        """Check every field, and take the usual size of groups where none is given.

        Raises:
            ConfigError: names the field, the value and what is allowed.
        """
        self._check_numbers()
        check_fields(self, "swarm ", besides=("local_steps_per_round",))
        if self.mean is None:
            object.__setattr__(self, "mean", MEANS[self.average == "gradient"])
        check_rule(
            (self.target_batch_tokens > 0) == (self.average == "gradient"),
            "target_batch_tokens",
            self.target_batch_tokens,
            "at least 1 with gradient averaging, 0 without",
        )
        check_group_size(self.group_size, self.average)
        check_mean(self.mean, self.average)
        if self.group_size is None:
            usual = 0 if self.average == "gradient" else GROUP_SIZE
            object.__setattr__(self, "group_size", usual)

    def _check_numbers(self) -> None:
        steps = self.local_steps_per_round
        check_rule(
            steps >= MEASURED, "local_steps_per_round", steps, "at least 1, or 0 for as measured"
        )
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        check_rule(0 < rate <= 2, "outer_learning_rate", rate, "above 0, at most 2")
        check_rule(0 <= momentum < 1, "outer_momentum", momentum, "at least 0, below 1")
        overlap, limit = self.overlap_weight, self.norm_limit
        check_rule(0 <= overlap <= 1, "overlap_weight", overlap, "0 to 1")
        check_rule(limit == 0 or 2 <= limit < math.inf, "norm_limit", limit, "0, or at least 2")

    @property
    def guard(self) -> Guard:
        """What owners do with contributions that cannot be honest."""
        from atomtrain.swarm.membership.guards import Guard

        return Guard(limit=self.norm_limit, mean=self.mean)

    @property
    def outer(self) -> OuterUpdate:
        """The outer update."""
        from atomtrain.swarm.anchors.updates import OuterUpdate

        return OuterUpdate(learning_rate=self.outer_learning_rate, momentum=self.outer_momentum)


def check_mean(mean: str | None, average: str) -> None:
    """Check that rounds can average this way (None: the default).

    Raises:
        ConfigError: they cannot.
    """
    check_rule(mean in (None, *MEANS), "mean", mean, choices(str(mean), MEANS))
    if mean == "clipped" and average == "gradient":
        raise ConfigError(
            "--average gradient takes the mean over all tokens of the batch, which is a plain one; "
            "leave --mean out"
        )


def check_group_size(size: int | None, average: str) -> None:
    """Check that rounds can have groups of at most `size` members (None: the default).

    Raises:
        ConfigError: they cannot.
    """
    if size is None:
        return
    if size != 0 and size < GROUP_SIZE_MIN:
        raise ConfigError(
            f"--group-size must be 0 (one group of all) or at least {GROUP_SIZE_MIN}, not {size}"
        )
    if size and average == "gradient":
        raise ConfigError(
            "--average gradient averages all peers in one group; leave --group-size out"
        )


def check_rule(good: bool, key: str, value: Any, allowed: str) -> None:
    """Refuse a setting of a swarm if it is not `good`; says what is allowed."""
    if not good:
        raise ConfigError(f"swarm {key} is {value!r}; allowed: {allowed}")
