"""Pipelines of unlike peers that come and go: what they reach where `fleet` simulates ATOM.

A pipeline runs at the pace of its slowest stage, computing or sending, and stops where a stage is
lost until somebody has taken its place. Everything that nobody can know better is decided for the
pipelines:

- The peers that are here form as many pipelines as they can, like with like, so that the slowest
  hold up each other only; they form anew whenever somebody leaves or comes, which costs nothing and
  takes no time, and whoever is left over, the slowest, is spare. (Pipelines that are formed anew of
  the survivors: Jang et al. 2023, Oobleck, arXiv 2309.08125.)
- A loss is noticed at once. A spare peer takes the place if there is one; else the pipeline is
  dissolved and its survivors are spare, until enough are here again.
- Who takes a place fetches what a newcomer of ATOM fetches, but of one stage only: float32
  parameters, at the full rate of its own link down; somebody always has them as they were after the
  last step. The optimizer's moments come along for nothing.
- What a step had accumulated at the lost stage is lost, so half a step is done again. (Without that
  stages would have to be computed twice: Thorpe et al. 2022, Bamboo, arXiv 2204.12013.)
- Pipelines average their gradients in no time, and none waits for another.

The number of stages is the one that is best under all this.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atomresearch.simulation.compare import PipelineChoice, Site, pipelines
from atomresearch.simulation.fleet import Peers
from atomresearch.simulation.link import PipelineLink
from atomtrain.errors import ConfigError

_FETCHED_BYTES_PER_PARAMETER = 4
_REDONE_STEPS = 0.5
_MOST_CHANGES = 20_000
"""After so many peers left or came the rest of the time would not change the mean."""


class PipelinesRun(NamedTuple):
    """What came of it."""

    elapsed_s: float
    """What was simulated; less than was asked for where very many peers come and go."""
    tokens_per_s: float
    share_of_staying: float
    """To what the same peers reach as such pipelines if all of them stay."""
    stages: int
    wire: str
    recompute: bool
    pipelines: float
    """Mean number of complete ones."""
    stopped_share: float
    """Of these, how many wait on average for the state of a stage or do a step again."""
    losses: int
    """How often a peer left that was a stage."""


class _Change(NamedTuple):
    at_s: float
    peer: int
    """Leaves if it is here, else it comes back."""


def simulate_pipelines(
    site: Site, peers: Peers, link: PipelineLink, lasting_s: float, seed: int = 0
) -> PipelinesRun | None:
    """Run the best pipelines of such peers for a time; all are here at its beginning.

    Args:
        site: The peers as they would be without differences: `step_s` is that of a peer of usual
            speed.
        peers: What they are like; as many as `site` has.
        link: The usual link, both ways alike; its delay counts for all.
        lasting_s: Above 0.
        seed: Of when who leaves and comes.

    Returns:
        The run of the best number of stages; `None` if none fits the devices.

    Raises:
        ConfigError: another number of peers, or no time.
    """
    if peers.count != site.peers or lasting_s <= 0:
        raise ConfigError(
            f"{peers.count} peers for {lasting_s:g} s are given; give {site.peers} peers, as the "
            "site has, and more than 0 s"
        )
    changes, until_s = _changes(peers, lasting_s, np.random.default_rng(seed))
    runs = [
        _Pipelines(choice, site, peers, link).run(changes, until_s)
        for choice in pipelines(site, link)
    ]
    return max(runs, key=lambda run: run.tokens_per_s, default=None)


def _changes(
    peers: Peers, lasting_s: float, random: np.random.Generator
) -> tuple[list[_Change], float]:
    """Return who leaves and comes when, and how long that is."""
    if math.isinf(peers.stay_s):
        return [], lasting_s
    found: list[_Change] = []
    here = [True] * peers.count
    first_s = random.exponential(peers.stay_s, peers.count)
    queue = [_Change(float(at_s), peer) for peer, at_s in enumerate(first_s)]
    heapq.heapify(queue)
    while queue[0].at_s < lasting_s:
        if len(found) == _MOST_CHANGES:
            return found, queue[0].at_s
        at_s, peer = queue[0]
        found.append(queue[0])
        here[peer] = not here[peer]
        mean_s = peers.stay_s if here[peer] else peers.away_s
        heapq.heapreplace(queue, _Change(at_s + float(random.exponential(mean_s)), peer))
    return found, lasting_s


class _Pipelines:
    """All pipelines of one way to cut the model. Peers stand in the order of their paces."""

    def __init__(
        self, choice: PipelineChoice, site: Site, peers: Peers, link: PipelineLink
    ) -> None:
        self.choice, self.stages = choice, choice.stages
        self.tokens = site.micro_batch_tokens
        # A stage amid others sends activations to one side and their gradients to the other.
        sent_bits = 8 * choice.boundary_bytes * (1 if choice.stages == 2 else 2)
        usual_s = max(choice.stage_s, sent_bits / link.bits_per_s)
        # What fills and drains the pipeline, and the ways that nothing hides, as among equals.
        reached = choice.tokens_per_s * usual_s / (choice.pipelines * self.tokens)
        computing_s = choice.stage_s * peers.step_s / site.step_s
        sending_s = sent_bits / np.minimum(peers.up_bits_per_s, peers.down_bits_per_s)
        pace_s = np.maximum(computing_s, sending_s) / reached
        order = np.argsort(pace_s, kind="stable")
        self.place_of = np.argsort(order)
        self.pace_s = pace_s[order]
        """Seconds of each peer for one micro-batch."""
        fetched_bits = 8 * _FETCHED_BYTES_PER_PARAMETER * choice.stage_parameters
        self.fetch_s = fetched_bits / peers.down_bits_per_s[order]
        self.here = np.ones(peers.count, dtype=bool)
        self.stops_s: list[float] = []
        """When each pipeline that stands still goes on; a heap."""
        self.now_s = self.trained = self.stood_s = self.complete_s = 0.0
        self.losses = 0
        self._form()

    def run(self, changes: Sequence[_Change], until_s: float) -> PipelinesRun:
        """Let the peers leave and come."""
        staying_tokens_per_s = self.tokens_per_s
        for change in changes:
            self._pass(change.at_s)
            place = int(self.place_of[change.peer])
            if self.here[place]:
                self._leave(place)
            else:
                self._come(place)
        self._pass(until_s)
        tokens_per_s = self.trained / until_s
        return PipelinesRun(
            elapsed_s=until_s,
            tokens_per_s=tokens_per_s,
            share_of_staying=tokens_per_s / staying_tokens_per_s,
            stages=self.stages,
            wire=self.choice.wire,
            recompute=self.choice.recompute,
            pipelines=self.complete_s / until_s,
            stopped_share=self.stood_s / self.complete_s if self.complete_s else 0.0,
            losses=self.losses,
        )

    def _form(self) -> None:
        """Form pipelines of those who are here, like with like."""
        self.present = np.flatnonzero(self.here)
        self.count = len(self.present) // self.stages
        slowest = self.present[self.stages - 1 :: self.stages][: self.count]
        self.paces_s = self.pace_s[slowest]
        self.tokens_per_s = float((self.tokens / self.paces_s).sum())
        # Of more that stand still than there are, those that are ready first count.
        self.stops_s = sorted(self.stops_s)[: self.count]

    def _leave(self, place: int) -> None:
        position = int(np.searchsorted(self.present, place))
        before, paces_s = self.count, self.paces_s
        self.here[place] = False
        self._form()
        if position >= before * self.stages:
            return  # it was spare
        self.losses += 1
        if self.count == before:
            # Whoever was the first spare is a stage now; everybody moves up, for nothing.
            step_s = self.choice.micro_batches * float(paces_s[position // self.stages])
            newcomer = self.present[before * self.stages - 1]
            self._stop(_REDONE_STEPS * step_s + float(self.fetch_s[newcomer]))

    def _come(self, place: int) -> None:
        before = self.count
        self.here[place] = True
        self._form()
        if self.count > before:
            self._stop(float(self.fetch_s[place]))

    def _stop(self, for_s: float) -> None:
        self.stops_s = sorted([*self.stops_s, self.now_s + for_s])[: self.count]

    def _pass(self, until_s: float) -> None:
        while self.stops_s and self.stops_s[0] <= until_s:
            self._train(self.stops_s[0])
            heapq.heappop(self.stops_s)
        self._train(until_s)

    def _train(self, until_s: float) -> None:
        """Let time pass in which nothing changes; which pipelines stand still is not known."""
        passed_s, stopped = until_s - self.now_s, len(self.stops_s)
        if self.count:
            self.trained += passed_s * self.tokens_per_s * (1 - stopped / self.count)
        self.stood_s += passed_s * stopped
        self.complete_s += passed_s * self.count
        self.now_s = until_s
