"""The methods that `atom bench network` compares, each measured on the link as it is now."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from atomtrain.benchmarks.common import progress
from atomtrain.benchmarks.network_peers import PeerError, Peers
from atomtrain.benchmarks.network_setup import (
    UNSHAPED_BITS_PER_S,
    NetworkSetup,
    device_link_bytes_per_s,
)
from atomtrain.benchmarks.network_worker import Reply
from atomtrain.benchmarks.pipeline_search import (
    Candidate,
    Speeds,
    candidates,
    to_measure,
)
from atomtrain.benchmarks.shaping import INTERFACE, PAYLOAD_SHARE, Link, Network
from atomtrain.simulation.swarm import SwarmLink, SwarmRun, SwarmWork, simulate_swarm
from atomtrain.swarm.config import SwarmConfig

_START_S = 120.0
_GROUP_PORT = 29_500
_PROBE_S = 0.7
_AHEAD_S = 0.3
_LATE_FACTOR = 6.0
_WARM_UP_BELOW_S = 6.0
LOSSES_OF_PEERS = "losses_of_peers"
"""Key of `Methods.atom`'s result."""


class Measured(NamedTuple):
    """One measurement of one method, all peers together."""

    tokens_per_s: float
    sent_bytes_per_token: float
    """Bytes on the wire of all peers, headers included, for each token."""
    steps: int
    loss: float
    """Mean over the steps."""
    losses: list[float]
    """Of each step, in order."""
    elapsed_s: float
    warm_up: int
    """Steps before these that trained too, and are counted in none of the others."""

    def plain(self) -> dict[str, Any]:
        """Return everything but the losses of the steps."""
        values = self._asdict()
        del values["losses"]
        return values


class Search(NamedTuple):
    """What the search for a pipeline found."""

    best: Candidate
    sequences: int
    """Sequences in a step: fewer than asked for where a step would take too long."""
    predicted_tokens_per_s: float
    considered: int
    trials: list[dict[str, Any]]
    """`pipeline`, `predicted_tokens_per_s` and `tokens_per_s` (`None`: it failed) of each."""


class Methods:
    """Keeps the peers of all methods between links; a context that ends them."""

    def __init__(self, setup: NetworkSetup, network: Network, folder: Path) -> None:
        self.setup, self.network, self.folder = setup, network, folder
        self._gloo: Peers | None = None
        self._atom: Peers | None = None
        self._opened = False
        self._groups = 0
        self.plan = ""
        """ATOM's plan, for people."""
        self._exchange_bytes: list[int] = []
        self._atom_step_s = 0.0

    def __enter__(self) -> Methods:
        progress("starting the peers")
        try:
            # Both kinds import their packages before anything is measured.
            self._start_atom()
            self._baselines()
            self._start_atom().tell_all("hello", _START_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all peers; idempotent."""
        for peers in (self._gloo, self._atom):
            if peers is not None:
                peers.close()
        self._gloo = self._atom = None

    def speeds(self) -> Speeds:
        """Measure how fast the peers compute, all at once, without any network."""
        tried = self.setup.model.micro_batches_tried
        sizes = [size for size in tried if self.setup.step_sequences % size == 0]
        replies = self._baselines().tell_all(
            "speeds", _START_S, model=self.setup.model.to_json(), micro_batches=sizes
        )
        return Speeds.of(replies)

    def probe(self, link: Link) -> Reply:
        """Measure rate and round trip of the link between two peers."""
        rate = link.bits_per_s or UNSHAPED_BITS_PER_S
        probe_bytes = min(64 << 20, max(16 << 10, int(rate * _PROBE_S / 8)))
        replies = self._baselines().tell_all(
            "probe", 60 + 10 * 8 * probe_bytes / rate, probe_bytes=probe_bytes
        )
        return next(reply for reply in replies if reply)

    def search(self, link: Link, speeds: Speeds, until_s: float) -> Search:
        """Find the best pipeline for the link; no trial is begun after `until_s`."""
        setup = self.setup
        sequences = setup.step_sequences
        ranked = self._ranked(sequences, speeds, link)
        while ranked[0].predicted_s > setup.longest_step_s and sequences > 2 * setup.peers:
            sequences //= 2
            ranked = self._ranked(sequences, speeds, link)
        trials: list[dict[str, Any]] = []
        measured: list[tuple[float, Candidate]] = []
        for candidate in to_measure(ranked, setup.model, setup.peers)[: setup.trials]:
            if measured and time.monotonic() > until_s:
                break
            rate = self._trial(candidate, sequences)
            if rate is not None:
                measured.append((rate, candidate))
            tokens = sequences * setup.model.sequence_tokens
            predicted = tokens / candidate.predicted_s
            trials.append(
                {
                    "pipeline": candidate.name(),
                    "predicted_tokens_per_s": predicted,
                    "tokens_per_s": rate,
                }
            )
        if not measured:
            raise PeerError("no pipeline ran on this link; see standard error for the reasons")
        best = max(measured, key=lambda pair: pair[0])[1]
        return Search(best, sequences, tokens / best.predicted_s, len(ranked), trials)

    def pipeline(self, search: Search, seconds: float) -> Measured:
        """Measure the pipeline that was found for about `seconds`."""
        steps = max(1, round(seconds / search.best.predicted_s))
        return self._pipeline(search.best, search.sequences, steps)

    def pipeline_memory(self, search: Search) -> int:
        """Return the device bytes of the peer that needs most, counted in a step without network.

        PyTorch's own schedules keep what ours keep with as many micro-batches in flight.
        """
        replies = self._baselines().tell_all(
            "pipeline_memory",
            _START_S,
            lambda rank: {"rank": rank},
            model=self.setup.model.to_json(),
            plan=search.best.plan(),
            sequences=search.sequences,
            ranks=self.setup.peers,
        )
        return max(int(reply["device_peak_bytes"]) for reply in replies)

    def data_parallel(self, link: Link, speeds: Speeds) -> Measured | str:
        """Measure averaging in every step, or return why it was left out."""
        setup, model = self.setup, self.setup.model
        rate = link.bits_per_s or UNSHAPED_BITS_PER_S
        wire_bits = 32 * model.parameters * 2 * (setup.peers - 1) / setup.peers
        tokens = model.tokens_per_step
        step_s = tokens / speeds.tokens_per_s(model) + wire_bits / rate
        if step_s > setup.longest_step_s:
            return f"a step would take at least {step_s:.0f} s"
        steps = max(1, round(setup.window_s / step_s))
        replies = self._baselines().tell_all(
            "data_parallel",
            self._patience_s((steps + 1) * step_s),
            model=model.to_json(),
            micro_batch=setup.micro_batch,
            steps=steps,
            warm_up=1,
        )
        return _measured(replies, setup.step_sequences * model.sequence_tokens, steps, 1)

    def atom(self, link: Link, speeds: Speeds) -> Reply:
        """Measure ATOM: a new run on unshaped links, then `link` while it trains."""
        peers = self._atoms(speeds)
        setup = self.setup
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
        self.network.shape(link)
        predicted = self._predicted(link)
        window_s = self._window_s(predicted)
        begin_s = time.monotonic() + _AHEAD_S
        start_s = begin_s + setup.settle_s
        replies = peers.tell_all(
            "train",
            self._patience_s(setup.settle_s + window_s + 3 * self._atom_step_s),
            begin_s=begin_s,
            start_s=start_s,
            until_s=start_s + window_s,
            least_steps=2,
            upload=self._upload_limit_bytes_per_s(link),
        )
        self.network.shape(Link(bits_per_s=None))
        peers.tell_all("leave", _START_S)
        return self._atom_result(replies, predicted)

    def _enter(self, peers: Peers, index: int, join: str | None, shared: dict[str, Any]) -> str:
        address = self.network.address(index)
        reply = peers.tell(index, "enter", _START_S, join=join, address=address, **shared)
        self._exchange_bytes = reply["exchange_bytes"]
        return str(reply["address"])

    def _predicted(self, link: Link) -> SwarmRun:
        """Simulate the swarm, with the step time that the engine had without one."""
        work = SwarmWork(
            step_s=[self._atom_step_s] * self.setup.peers,
            tokens_per_step=self.setup.model.tokens_per_step,
            exchange_bytes=self._exchange_bytes,
            local_steps=self.setup.local_steps,
        )
        limit = self._upload_limit_bytes_per_s(link)
        rate = 8 * limit if limit else PAYLOAD_SHARE * UNSHAPED_BITS_PER_S
        return simulate_swarm(work, SwarmLink(bits_per_s=rate, one_way_s=link.round_trip_s / 2))

    def _upload_limit_bytes_per_s(self, link: Link) -> float:
        """Return ATOM's limit on a link; 0: none."""
        return self.setup.upload_share * (link.bits_per_s or 0.0) / 8

    def _window_s(self, predicted: SwarmRun) -> float:
        """Return how long to train: until a round is over, within bounds."""
        setup = self.setup
        round_s = predicted.averaged_every_s / len(self._exchange_bytes)
        wanted_s = max(setup.window_s, 1.5 * round_s + 2 * self._atom_step_s)
        return wanted_s if wanted_s <= setup.longest_window_s else setup.window_s

    def _atom_result(self, replies: list[Reply], predicted: SwarmRun) -> Reply:
        tokens = sum(reply["tokens"] for reply in replies)
        trained_s = [reply["ended_s"] - reply["started_s"] for reply in replies]
        # Peers end with a step of their own: each one's rate is its own, and they add up.
        rate = sum(r["tokens"] / t for r, t in zip(replies, trained_s, strict=True))
        return {
            "tokens_per_s": rate,
            "sent_bytes_per_token": sum(reply["sent_bytes"] for reply in replies) / tokens,
            "window_s": max(trained_s),
            "steps": sum(reply["steps"] for reply in replies),
            "rounds_averaged": max(reply["averaged"] for reply in replies),
            "rounds": dict(sum((Counter(r["rounds"]) for r in replies), Counter())),
            "reasons": sorted({reason for reply in replies for reason in reply["reasons"]}),
            "round_s": [s for reply in replies for s in reply["round_s"]],
            "predicted_tokens_per_s": predicted.tokens_per_s,
            "predicted_round_s": predicted.round_s,
            "predicted_averaged_every_s": predicted.averaged_every_s,
            "predicted_averaged_every_tokens": predicted.averaged_every_s * rate,
            "link_wait_share": sum(reply["link_wait_s"] for reply in replies) / sum(trained_s),
            "device_peak_bytes": max(reply["device_peak_bytes"] for reply in replies),
            "loss": statistics.fmean(loss for reply in replies for loss in reply["losses"]),
            LOSSES_OF_PEERS: [reply["losses"] for reply in replies],
        }

    def _baselines(self) -> Peers:
        """Return the baselines' peers in one group, started on unshaped links if need be."""
        if self._gloo is not None and self._gloo.failed:
            self._gloo.close()
            self._gloo = None
        if self._gloo is None:
            self._gloo = Peers("gloo", self.network, self.setup.peers, self.folder)
            self._groups += 1
            self._gloo.tell_all(
                "enter",
                _START_S,
                lambda rank: {"rank": rank},
                address=self.network.address(0),
                port=_GROUP_PORT + self._groups,
                ranks=self.setup.peers,
                interface=INTERFACE,
                timeout_s=self.setup.case_s * _LATE_FACTOR,
            )
        return self._gloo

    def _atoms(self, speeds: Speeds) -> Peers:
        peers = self._start_atom()
        if not self._opened:
            setup = self.setup
            peer_flops = speeds.tokens_per_s(setup.model) * setup.model.flops_per_token
            replies = peers.tell_all(
                "open",
                _START_S,
                lambda index: {"seed": index},
                model=setup.model.to_json(),
                micro_batch=setup.micro_batch,
                device_link_bytes_per_s=device_link_bytes_per_s(setup, peer_flops),
                device_memory_bytes=setup.budget_bytes,
            )
            self.plan = str(replies[0]["plan"])
            self._atom_step_s = max(reply["step_s"] for reply in replies)
            self._opened = True
        return peers

    def _start_atom(self) -> Peers:
        if self._atom is not None and self._atom.failed:
            self._atom.close()
            self._atom, self._opened = None, False
        if self._atom is None:
            self._atom = Peers("atom", self.network, self.setup.peers, self.folder)
        return self._atom

    def _ranked(self, sequences: int, speeds: Speeds, link: Link) -> list[Candidate]:
        setup = self.setup
        return candidates(
            setup.model, setup.peers, sequences, speeds, link, setup.pipeline_budget_bytes
        )

    def _trial(self, candidate: Candidate, sequences: int) -> float | None:
        steps = max(1, min(4, round(self.setup.trial_s / candidate.predicted_s)))
        try:
            return self._pipeline(candidate, sequences, steps).tokens_per_s
        except PeerError as error:
            progress(f"a pipeline failed ({candidate.name()}): {error}")
            return None

    def _pipeline(self, candidate: Candidate, sequences: int, steps: int) -> Measured:
        warm_up = int(candidate.predicted_s < _WARM_UP_BELOW_S)
        replies = self._baselines().tell_all(
            "pipeline",
            self._patience_s((steps + warm_up) * candidate.predicted_s),
            model=self.setup.model.to_json(),
            plan=candidate.plan(),
            sequences=sequences,
            steps=steps,
            warm_up=warm_up,
        )
        return _measured(replies, sequences * self.setup.model.sequence_tokens, steps, warm_up)

    def _patience_s(self, expected_s: float) -> float:
        return 30.0 + _LATE_FACTOR * expected_s


def _measured(replies: list[Reply], tokens_per_step: int, steps: int, warm_up: int) -> Measured:
    ended_s = max(reply["ended_s"] for reply in replies)
    elapsed_s = ended_s - min(reply["started_s"] for reply in replies)
    tokens = tokens_per_step * steps
    # A pipeline's last rank alone knows the loss; with data parallelism each has its own.
    known = [reply["losses"] for reply in replies if reply["losses"]]
    losses = [statistics.fmean(each) for each in zip(*known, strict=True)]
    return Measured(
        tokens / elapsed_s,
        sum(reply["sent_bytes"] for reply in replies) / tokens,
        steps,
        statistics.fmean(losses),
        losses,
        elapsed_s,
        warm_up,
    )
