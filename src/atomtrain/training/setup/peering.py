"""Between engine and swarm: fragments of the host store, and what a newcomer must know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atomtrain.engine.engine import Engine
from atomtrain.errors import ConfigError, SwarmError
from atomtrain.settings import asked_of, chosen, declared
from atomtrain.swarm.anchors.updates import OUTERS, OVERLAP_WEIGHTS, outer_named
from atomtrain.swarm.membership.config import SwarmConfig, relay_limit_of
from atomtrain.swarm.membership.rules import Rules
from atomtrain.swarm.transport.endpoint import Endpoint
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import LAN, SEPARATOR, entries_of
from atomtrain.training.config.recipe import Recipe
from atomtrain.units import parse_rate

if TYPE_CHECKING:
    from pathlib import Path

    from atomtrain.swarm import Manifest

_FEW_FRAGMENTS = 4
_LARGEST_FRAGMENT_BYTES = 2 << 30


class EngineFragments:
    """Gives the swarm exclusive views of the engine's parameters, fragment by fragment."""

    def __init__(
        self, engine: Engine, *, most: int | None = None, like: Sequence[int] | None = None
    ) -> None:
        """Divide the parameters into the engine's fragments, or join those that lie side by side.

        Args:
            engine: Its host memory is lent.
            most: Largest number of fragments. One is averaged after each local step at most, so
                that with more fragments than local steps the model would be averaged too seldom.
            like: Elements of each fragment as a run has them; ignored if they do not fit.
        """
        self._engine = engine
        ranges = engine.fragment_ranges()
        sizes = [(stop - start) // engine.element_bytes for start, stop in ranges]
        runs = None if like is None else joined_like(sizes, like)
        self._ranges = [
            (ranges[first][0], ranges[last - 1][1]) for first, last in runs or joined(sizes, most)
        ]

    @property
    def elements(self) -> tuple[int, ...]:
        each_bytes = self._engine.element_bytes
        return tuple((stop - start) // each_bytes for start, stop in self._ranges)

    def view(self, index: int) -> AbstractContextManager[Tensor]:
        """Return exclusive access to a fragment; between two steps only."""
        return self._engine.fragment(*self._ranges[index])

    def forget_moments(self) -> None:
        """Have the optimizer begin anew; between two steps only.

        One parameter after the other, since those on a disk are copied, and all with zeros, which
        is what each optimizer of PyTorch and of this package begins with.
        """
        self._engine.synchronize()
        masters = self._engine.masters
        for parameter in self._engine.model.parameters():
            moments = masters.moments(parameter)
            masters.set_moments(parameter, {key: _nothing(value) for key, value in moments.items()})


def _nothing(value: object) -> object:
    """Return the zero of a kind; a tensor itself."""
    if isinstance(value, Tensor):
        return value.zero_()
    return type(value)() if isinstance(value, int | float) else value


def most_fragments(engine: Engine, local_steps: int) -> int:
    """Return how many fragments a new run has at most; `local_steps` 0 stands for measured ones.

    Each fragment takes a round of its own, and a round a step at least. So where the link could do
    with fewer steps between the model's averages, many fragments would be what takes longest; but
    a round's memory is several times its fragment's.
    """
    if local_steps:
        return local_steps
    total_bytes = sum(stop - start for start, stop in engine.fragment_ranges())
    return max(_FEW_FRAGMENTS, -(-total_bytes // _LARGEST_FRAGMENT_BYTES))


def joined(sizes: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    """Return at most `most` runs of neighbours, `(first, last + 1)`, of much the same size."""
    if most is None or len(sizes) <= most:
        return [(i, i + 1) for i in range(len(sizes))]
    total, done, first = sum(sizes), 0, 0
    runs: list[tuple[int, int]] = []
    for i, size in enumerate(sizes):
        done += size
        if done * most >= total * (len(runs) + 1):
            runs.append((first, i + 1))
            first = i + 1
    return runs


def joined_like(sizes: Sequence[int], like: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the runs of neighbours whose sizes are `like`; None if there are none such."""
    runs, at = [], 0
    for wanted in like:
        first, found = at, 0
        while found < wanted and at < len(sizes):
            found += sizes[at]
            at += 1
        if found != wanted:
            return None
        runs.append((first, at))
    return runs if at == len(sizes) else None


def pasted_address(run: str, address: str) -> str:
    """Return what another peer gives to `--join`."""
    return f"{run}{SEPARATOR}{address}"


def with_addresses(options: TrainOptions) -> TrainOptions:
    """Return the options with one address in each entry of `join`.

    Lists are taken apart, and `lan` becomes the addresses found on the local network.

    Raises:
        SwarmError: the local network has no such run, or several.
    """
    entries = entries_of(options)
    if LAN not in entries:
        return dataclasses.replace(options, join=tuple(entries))
    from atomtrain.swarm.membership import lan

    run, found = lan.find(options.run, options.listen_host)
    pasted_found = [pasted_address(run, address) for address in found]
    others = [entry for entry in entries if entry != LAN]
    return dataclasses.replace(options, join=(*others, *pasted_found))


def swarm_config(
    options: TrainOptions,
    run: str | None,
    name: str,
    directory: Path | None,
    local_steps: int,
    fragments: int = 1,
) -> SwarmConfig:
    """Return the swarm's configuration; `local_steps` 0: as measurements say.

    Raises:
        SwarmError: the addresses name different runs, or none is known.
    """
    from atomtrain.swarm.membership.known_peers import PEERS_FILE
    from atomtrain.swarm.membership.standing import STANDING_FILE

    runs = {run} if run else set()
    addresses = []
    for pasted in options.join:
        named, separator, address = pasted.rpartition(SEPARATOR)
        if separator:
            runs.add(named)
        addresses.append(address)
    if len(runs) != 1:
        found = ", ".join(sorted(runs)) or "no name"
        raise SwarmError(
            f"which run to join is not clear ({found} given); paste the whole line that a peer of "
            "the run prints: atom train --join RUN@ADDRESS"
        )
    limit = options.upload_limit
    key_path = options.identity or (directory and directory / "identity.key")
    return SwarmConfig(
        run=runs.pop(),
        rules=_rules(options, 0 if options.measured_rounds else local_steps, fragments),
        endpoint=Endpoint(
            **{
                **chosen(options, Endpoint),
                "listen_host": options.listen_host,
                "identity_path": key_path,
            }
        ),
        name=name,
        join=tuple(addresses),
        peers_path=directory and directory.parent / PEERS_FILE,
        standing_path=directory and directory / STANDING_FILE,
        discoverable=not options.hidden,
        upload_limit_bytes_per_s=math.inf if limit is None else parse_rate(limit),
        relay_limit_bytes_per_s=relay_limit_of(options.relay_limit),
        key_path=options.run_key,
        allow_path=options.allow,
    )


def _rules(options: TrainOptions, steps_per_round: int, fragments: int) -> Rules:
    """Return the rules of a run that somebody starts with these options."""
    name = options.outer or OUTERS[0]
    outer = outer_named(name, steps_per_round, fragments)
    settings: dict[str, Any] = {
        **chosen(options, Rules),
        "local_steps_per_round": steps_per_round,
    }
    return Rules(
        outer_learning_rate=outer.learning_rate,
        outer_momentum=outer.momentum,
        overlap_weight=OVERLAP_WEIGHTS[name],
        **settings,
    )


def knows_peers(run: str, folder: Path) -> bool:
    from atomtrain.swarm.membership.known_peers import PEERS_FILE, KnownPeers

    return len(KnownPeers(run, folder / PEERS_FILE)) > 0


def forget_peers(folder: Path) -> None:
    """Remove the list of peers of an earlier run of the same name: a new one has none."""
    from atomtrain.swarm.membership.known_peers import PEERS_FILE

    (folder / PEERS_FILE).unlink(missing_ok=True)


def with_rules(options: TrainOptions, rules: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a founder who resumes: what he leaves out stays as it was.

    Args:
        options: As given now.
        rules: Those of the run in its checkpoint; may be empty.
    """
    measured = rules.get("local_steps_per_round") == 0 and options.local_steps is None
    outer = ("nesterov" if rules.get("outer_momentum") else "mean") if rules else None
    kept: dict[str, Any] = {
        ours: rules.get(theirs) or None for ours, theirs in asked_of(options, Rules)
    }
    del kept["local_steps"]  # the recipe has them
    # Another way to average has another size of groups, where 0 is one, too, and another mean.
    as_before = not options.average
    for name in ("group_size", "mean"):
        kept[name] = rules.get(name) if as_before else None
    missing = {name: value for name, value in kept.items() if getattr(options, name) is None}
    return dataclasses.replace(
        options,
        **missing,
        outer=options.outer or outer,
        measured_rounds=options.measured_rounds or measured,
    )


def check_rules(options: TrainOptions, rules: Rules, run: str) -> None:
    """Refuse options of somebody who joins that contradict what the founder has set.

    Raises:
        ConfigError: says which; otherwise it would have no effect, without a word.
    """
    fixed: dict[str, Any] = {
        # A rule of 0 may have a name.
        ours: getattr(rules, theirs) or declared(Rules, theirs).metadata.get("zero", 0)
        for ours, theirs in asked_of(options, Rules)
    }
    fixed["outer"] = "nesterov" if rules.outer_momentum else "mean"
    wrong = [
        f"--{name} {given} contradicts the run {run!r}, which has {name} {value}"
        for name, given, value in (
            (field.replace("_", "-"), getattr(options, field), value)
            for field, value in fixed.items()
        )
        if given not in (None, value)
    ]
    if options.measured_rounds and rules.local_steps_per_round:
        wrong.append(
            f"--measured-rounds contradicts the run {run!r}, which has local-steps "
            f"{rules.local_steps_per_round}"
        )
    if wrong:
        raise ConfigError(f"{wrong[0]} from who started it; leave the option out")


def manifest_of(
    run: str, recipe: Recipe, tokenizer: str, separator: str, elements: Sequence[int]
) -> Manifest:
    """Return what newcomers are told."""
    from atomtrain.swarm import Manifest

    payload = {"recipe": recipe.to_json(), "tokenizer": tokenizer, "separator": separator}
    return Manifest(run, tuple(elements), payload)
