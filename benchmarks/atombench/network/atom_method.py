"""ATOM in `atom bench network`: its engine at its best, alone and as a swarm."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from atombench.common import progress
from atombench.links.peers import Peers, Reply
from atombench.links.shaping import Link, Network
from atombench.network.model import Speeds
from atombench.network.setup import (
    UNSHAPED_BITS_PER_S,
    NetworkSetup,
    device_link_bytes_per_s,
)
from atomresearch.simulation.link import PAYLOAD_SHARE
from atomresearch.simulation.swarm import SwarmLink, SwarmRun, SwarmWork, simulate_swarm
from atomtrain.errors import PlanError
from atomtrain.swarm.membership.config import SwarmConfig

START_S = 120.0
LATE_FACTOR = 6.0
_AHEAD_S = 0.3
_MEET_S = 30.0
LOSSES_OF_PEERS = "losses_of_peers"
BEFORE_STEPS = "before_steps"
"""Keys of what `AtomMethod.measure` returns."""


def patience_s(expected_s: float) -> float:
    """Return how long an answer that should take `expected_s` is waited for."""
    return 30.0 + LATE_FACTOR * expected_s


class _Alone(NamedTuple):
    """What the peers do each for itself, all at once."""

    tokens_per_s: float
    """Of all of them."""
    compute_s: float
    """What a step's computation takes of a core."""


class AtomMethod:
    """Keeps ATOM's peers, and their engines, between links."""

    def __init__(self, setup: NetworkSetup, network: Network, folder: Path) -> None:
        """Start nothing yet."""
        self.setup, self.network, self.folder = setup, network, folder
        self.plan = ""
        """The plan, for people."""
        self.micro_batches: dict[int, float | None] = {}
        """Seconds of a step by sequences in a micro-batch; `None`: it does not fit."""
        self._peers: Peers | None = None
        self._opened = False
        self._fresh = False
        """Whether the engines have trained nothing yet but their first steps."""
        self._open_size: int | None = None
        self._exchange_bytes: list[int] = []
        self.step_s = 0.0
        """Of the engines as they are open, all of them computing at once and each for itself."""

    def close(self) -> None:
        """End the peers; idempotent."""
        if self._peers is not None:
            self._peers.close()
        self._peers = None

    def measure(self, link: Link, speeds: Speeds) -> Reply:
        """Measure ATOM: a new run on unshaped links, then `link` while it trains.

        Before and after, all peers train at the same time too, but each for itself. They share the
        cores as in the swarm, so `share_of_alone` is what averaging leaves. The swarm starts from
        the weights that every method starts from. With several turns the one with the middle share
        is returned, and `shares_of_alone` are those of all.
        """
        peers = self._ready(speeds)
        alone = [self._alone(peers)]
        turns: list[Reply] = []
        for _ in range(self.setup.turns):
            together = self._together(peers, link, speeds)
            alone.append(self._alone(peers))
            turns.append({**together, **_beside(alone[-2:], together["tokens_per_s"])})
        if not self.setup.alone_s:
            return turns[0]
        shares = [turn["share_of_alone"] for turn in turns]
        middle = turns[shares.index(statistics.median_low(shares))]
        return {**middle, "shares_of_alone": shares}

    def _together(self, peers: Peers, link: Link, speeds: Speeds) -> Reply:
        """Have all peers train as a swarm of a new run, on `link`."""
        setup = self.setup
        if not self._fresh:
            assert self._open_size is not None
            self._open(peers, speeds, self._open_size)
        self._fresh = False
        rate = link.bits_per_s or UNSHAPED_BITS_PER_S
        run = f"network-{secrets.token_hex(4)}"
        self.network.shape(Link(bits_per_s=None))
        shared = {
            "run": run,
            "peers": setup.peers,
            "local_steps": setup.local_steps,
            "wire": setup.wire,
            "link_bytes_per_s": min(SwarmConfig.slowest_link_bytes_per_s, rate / 8),
        }
        address = self._enter(peers, 0, None, shared)
        for index in range(1, setup.peers):
            self._enter(peers, index, address, shared)
        met = peers.tell_all("meet", START_S, peers=setup.peers, patience_s=_MEET_S)
        if any(reply["known"] < setup.peers for reply in met):
            progress("not all of ATOM's peers know of each other: rounds may leave somebody out")
        self.network.shape(link)
        predicted = self._predicted(link)
        window_s, longest_s = self._window_s(predicted)
        begin_s = time.monotonic() + _AHEAD_S
        start_s = begin_s + setup.settle_s
        replies = peers.tell_all(
            "train",
            patience_s(setup.settle_s + longest_s + 3 * self.step_s),
            begin_s=begin_s,
            start_s=start_s,
            until_s=start_s + window_s,
            least_steps=2,
            upload=self._upload_limit_bytes_per_s(link),
            round_until_s=start_s + longest_s,
        )
        self.network.shape(Link(bits_per_s=None))
        peers.tell_all("leave", START_S)
        return self._result(replies, predicted, link)

    def _alone(self, peers: Peers) -> _Alone | None:
        """Have all peers train, none in a swarm; `None`: not wanted."""
        alone_s = self.setup.alone_s
        if not alone_s:
            return None
        self._fresh = False
        begin_s = time.monotonic() + _AHEAD_S
        replies = peers.tell_all(
            "train",
            patience_s(alone_s + 3 * self.step_s),
            begin_s=begin_s,
            start_s=begin_s,
            until_s=begin_s + alone_s,
            least_steps=2,
        )
        return _Alone(_rate(replies), _compute_s(replies))

    def _enter(self, peers: Peers, index: int, join: str | None, shared: dict[str, Any]) -> str:
        address = self.network.address(index)
        reply = peers.tell(index, "enter", START_S, join=join, address=address, **shared)
        self._exchange_bytes = reply["exchange_bytes"]
        return str(reply["address"])

    def _predicted(self, link: Link) -> SwarmRun:
        """Simulate the swarm, with the step time that the engine had without one."""
        return self._simulated(link, self._exchange_bytes, self.setup.peers)

    def _simulated(self, link: Link, exchange_bytes: list[int], peers: int) -> SwarmRun:
        work = SwarmWork(
            step_s=[self.step_s] * peers,
            tokens_per_step=self.setup.model.tokens_per_step,
            exchange_bytes=exchange_bytes,
            local_steps=self.setup.local_steps,
        )
        limit = self._upload_limit_bytes_per_s(link)
        rate = 8 * limit if limit else PAYLOAD_SHARE * UNSHAPED_BITS_PER_S
        way_s, lost = link.round_trip_s / 2, link.loss_share
        return simulate_swarm(work, SwarmLink(bits_per_s=rate, one_way_s=way_s, loss_share=lost))

    def _upload_limit_bytes_per_s(self, link: Link) -> float:
        """Return ATOM's limit on a link; 0: none."""
        return self.setup.upload_share * (link.bits_per_s or 0.0) / 8

    def _window_s(self, predicted: SwarmRun) -> tuple[float, float]:
        """Return how long to train, and how long at most if no round has ended by then."""
        setup = self.setup
        round_s = predicted.averaged_every_s / len(self._exchange_bytes)
        wanted_s = max(setup.window_s, 1.5 * round_s + 2 * self.step_s)
        longest_s = max(setup.longest_window_s, setup.window_s)
        # Where no round is expected to fit, nothing is waited for.
        return (wanted_s, longest_s) if wanted_s <= longest_s else (setup.window_s, setup.window_s)

    def _round_s(self, link: Link, fragment: int, peers: int) -> float:
        """Return the predicted time of a round of so many peers."""
        return self._simulated(link, [self._round_bytes(fragment, peers)], peers).round_s

    def _round_bytes(self, fragment: int, peers: int) -> int:
        """Return what each of so many peers sends: (K - 1) / K of contribution and mean."""
        full = self.setup.peers
        return int(self._exchange_bytes[fragment] * (peers - 1) / peers * full / (full - 1))

    def _result(self, replies: list[Reply], predicted: SwarmRun, link: Link) -> Reply:
        tokens = sum(reply["tokens"] for reply in replies)
        trained_s = [reply["ended_s"] - reply["started_s"] for reply in replies]
        rate = _rate(replies)
        rounds = [
            each
            for reply in replies
            for each in zip(reply["round_fragments"], reply["round_peers"], strict=True)
        ]
        sent_bytes = [self._round_bytes(*each) for each in rounds] or self._exchange_bytes
        expected_s = [self._round_s(link, *each) for each in rounds] or [predicted.round_s]
        return {
            "tokens_per_s": rate,
            "sent_bytes_per_token": sum(reply["sent_bytes"] for reply in replies) / tokens,
            "window_s": max(trained_s),
            "steps": sum(reply["steps"] for reply in replies),
            "compute_s": _compute_s(replies),
            "rounds_averaged": max(reply["averaged"] for reply in replies),
            "rounds": dict(sum((Counter(r["rounds"]) for r in replies), Counter())),
            "reasons": sorted({reason for reply in replies for reason in reply["reasons"]}),
            "round_s": [s for reply in replies for s in reply["round_s"]],
            "predicted_tokens_per_s": predicted.tokens_per_s,
            "round_fragments": [fragment for fragment, _ in rounds],
            "round_peers": [peers for _, peers in rounds],
            "round_bytes": round(statistics.fmean(sent_bytes)),
            "predicted_round_s": statistics.fmean(expected_s),
            "predicted_averaged_every_s": predicted.averaged_every_s,
            "predicted_averaged_every_tokens": predicted.averaged_every_s * rate,
            "link_wait_share": sum(reply["link_wait_s"] for reply in replies) / sum(trained_s),
            "device_peak_bytes": max(reply["device_peak_bytes"] for reply in replies),
            "loss": statistics.fmean(loss for reply in replies for loss in reply["losses"]),
            LOSSES_OF_PEERS: [reply["losses"] for reply in replies],
            BEFORE_STEPS: max(reply["before_steps"] for reply in replies),
        }

    def _ready(self, speeds: Speeds) -> Peers:
        """Return ATOM's peers, their engines open with the best size of micro-batch."""
        peers = self.start()
        if not self._opened:
            refused = ""
            for size in self.setup.micro_batches:
                if size in self.micro_batches:  # tried before the peers were started anew
                    continue
                refused = self._open(peers, speeds, size) or refused
                fits = self._open_size is not None
                self.micro_batches[size] = self.step_s if fits else None
                if fits:
                    progress(f"micro-batches of {size}: ATOM's step takes {self.step_s:.2f} s")
            fitting = {size: s for size, s in self.micro_batches.items() if s is not None}
            if not fitting:
                raise PlanError(refused)
            best = min(fitting, key=lambda size: fitting[size])
            if self._open_size != best:
                self._open(peers, speeds, best)
            self._opened = True
        return peers

    def _open(self, peers: Peers, speeds: Speeds, micro_batch: int) -> str:
        """Open the engines, in place of any others; return why they do not fit, if so."""
        replies = peers.tell_all(
            "open",
            START_S,
            lambda index: {"seed": index},
            model=self.setup.model.to_json(),
            **self._inputs(speeds, micro_batch),
        )
        if refused := next((reply["refused"] for reply in replies if reply["refused"]), ""):
            self._open_size = None
            return str(refused)
        self.plan = str(replies[0]["plan"])
        self.step_s = max(reply["step_s"] for reply in replies)
        self._open_size, self._fresh = micro_batch, True
        return ""

    def engine_inputs(self, speeds: Speeds) -> dict[str, Any]:
        """Return with what an engine is opened at its best, by the names of `AtomPeer.open`.

        Raises:
            PlanError: no size of micro-batch fits the budget.
        """
        self._ready(speeds)
        assert self._open_size is not None
        return self._inputs(speeds, self._open_size)

    def _inputs(self, speeds: Speeds, micro_batch: int) -> dict[str, Any]:
        setup = self.setup
        peer_flops = speeds.tokens_per_s(setup.model) * setup.model.flops_per_token
        return {
            "micro_batch": micro_batch,
            "device_link_bytes_per_s": device_link_bytes_per_s(setup, peer_flops),
            "device_memory_bytes": setup.budget_bytes,
        }

    def start(self) -> Peers:
        """Return the peers, started if need be."""
        if self._peers is not None and self._peers.failed:
            self._peers.close()
            self._peers, self._opened, self._open_size = None, False, None
        if self._peers is None:
            self._peers = Peers("atom", self.network, self.setup.peers, self.folder)
        return self._peers


def _rate(replies: list[Reply]) -> float:
    """Return tokens per second; each peer ends with a step of its own, and so has its own time."""
    return float(sum(r["tokens"] / (r["ended_s"] - r["started_s"]) for r in replies))


def _compute_s(replies: list[Reply]) -> float:
    """Return what the computation of a step took of a core, on average."""
    return statistics.fmean(reply["compute_s"] for reply in replies)


def _beside(alone: list[_Alone | None], together: float) -> dict[str, float | None]:
    """Return what peers alone would train, and the share of it that the swarm does."""
    known = [each for each in alone if each is not None]
    if not known:
        return {"alone_tokens_per_s": None, "share_of_alone": None, "alone_compute_s": None}
    mean = statistics.fmean(each.tokens_per_s for each in known)
    return {
        "alone_tokens_per_s": mean,
        "share_of_alone": together / mean,
        "alone_compute_s": statistics.fmean(each.compute_s for each in known),
    }
