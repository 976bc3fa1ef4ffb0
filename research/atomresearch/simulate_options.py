"""What a user can say to `atom simulate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from atomtrain.errors import ConfigError
from atomtrain.training.config.option_checks import check_counts, check_seed, check_wire, memory_of
from atomtrain.training.config.options import option
from atomtrain.units import parse_rate

LINKS = ("10Gbit/s", "1Gbit/s", "300Mbit/s", "100Mbit/s", "30Mbit/s", "10Mbit/s")
OPTIMIZER = "adamw"
_FLEET_ONLY = ("group", "spread", "stay", "away", "seed")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What a user can say to `atom simulate`."""

    model: str = option(
        None, "Model by name, or the path of a Hugging Face config.json or its folder.", "MODEL"
    )
    gpu: str = option("rtx-3090", "GPU of every peer, by its name in the catalogue.", "NAME")
    here: bool = option(
        False,
        "Every peer is a machine like this one, as atom plan measures it, and no GPU's sheet.",
    )
    machine: Path | None = option(
        None, "Link, host and budgets of every peer from this file, of atom plan --save.", "FILE"
    )
    peers: int = option(8, "Number of peers.", "N")
    link: tuple[str, ...] = option(
        (), f"Rate of each peer's link, each way; may be repeated. Default: {', '.join(LINKS)}."
        , "RATE"
    )  # fmt: skip
    round_trip: float = option(0.02, "Round trip between any two peers, in seconds.", "SECONDS")
    host_memory: str | None = option(
        None, "Host memory, such as 128GiB. Default: what a usual host of the GPU holds.", "SIZE"
    )
    device_memory: str | None = option(
        None, "Device budget, such as 8GiB. Default: 90% of the GPU's memory.", "SIZE"
    )
    context: int | None = option(None, "Tokens of a sequence. Default: the model's.", "N")
    tokens_per_step: int | None = option(
        None, "Tokens of a peer's step. Default: what lets compute cover the link.", "N"
    )
    precision: str = option("fp32", "fp32, bf16 or fp16; both with exact float32 masters.", "TYPE")
    local_steps: int = option(30, "Local steps in which the whole model is averaged once.", "N")
    wire: str = option("float16", "How the swarm's averages travel.", "NAME")
    rounds: int | None = option(
        None,
        "Also run so many rounds with peers that differ, come and go; and pipelines of them.",
        "N",
    )
    group: int = option(
        16, "With --rounds: members average in shuffled groups of at most N; 0: in one of all.", "N"
    )
    upload: str | None = option(
        None, "Rate of a peer's way out, where that is slower than its way in (--link).", "RATE"
    )
    spread: float = option(
        0.3, "With --rounds: how unlike speeds and links are (deviation of the logarithm).", "X"
    )
    stay: float = option(
        7200.0, "With --rounds: mean time until a peer is gone without a word.", "SECONDS"
    )
    away: float = option(600.0, "With --rounds: mean time until it is back.", "SECONDS")
    seed: int = option(0, "With --rounds: of everything random.", "N")
    json: bool = option(False, "Print exactly one JSON object instead of a table.")

    def __post_init__(self) -> None:
        if not 0 <= self.round_trip <= 10:
            raise ConfigError(f"--round-trip takes 0 to 10 seconds, not {self.round_trip:g}")
        check_counts(self, "peers", least=2, most=1_000_000)
        check_counts(self, "local_steps", "context", "rounds")
        check_counts(self, "tokens_per_step", most=1 << 53)
        check_counts(self, "group", least=0)
        check_seed(self.seed)
        memory_of(self)
        if self.group == 1:
            raise ConfigError("--group 1: groups must be of at least 2; 0 is one group of all")
        for name in ("stay", "away"):
            if not 0 < getattr(self, name) < math.inf:
                seconds = getattr(self, name)
                raise ConfigError(f"--{name} takes seconds above 0, not {seconds:g}")
        for text in self.link:
            parse_rate(text, "--link")
        if self.upload is not None:
            parse_rate(self.upload, "--upload")
        check_wire(self.wire)
        if self.here and self._given(("gpu", "machine")):
            raise ConfigError("--here measures this machine; leave --gpu and --machine out")
        from atomtrain.training.config.optimizing import check_precision

        check_precision(self.precision, OPTIMIZER)
        if not 0 <= self.spread <= 2:
            raise ConfigError(f"--spread takes 0 (all alike) to 2, not {self.spread:g}")
        if self.rounds is None and (given := self._given(_FLEET_ONLY)):
            raise ConfigError(f"--{given} says something only of --rounds N; add it, such as 1000")

    def _given(self, names: Sequence[str]) -> str | None:
        """Return the first of these options that is not at its default."""
        defaults = {field.name: field.default for field in fields(self)}
        return next((name for name in names if getattr(self, name) != defaults[name]), None)
