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
from atomtrain.benchmarks.shaping import INTERFACE, Link, Network

_START_S = 120.0
_GROUP_PORT = 29_500
_PROBE_S = 0.7
_AHEAD_S = 0.3
_LATE_FACTOR = 6.0
_WARM_UP_BELOW_S = 6.0


class Measured(NamedTuple):
    """One measurement of one method, all peers together."""

    tokens_per_s: float
    sent_bytes_per_token: float
    """Bytes on the wire of all peers, headers included, for each token."""
    steps: int
    loss: float
    """Mean over the steps."""


class Search(NamedTuple):
    """What the search for a pipeline found."""

    best: Candidate
    sequences: int
    """Sequences in a step: fewer than asked for where a step would take too long."""
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
        self._fragments: list[int] = []
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
            predicted = sequences * setup.model.sequence_tokens / candidate.predicted_s
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
        return Search(best, sequences, len(ranked), trials)

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
        tokens = model.sequences_per_peer * model.sequence_tokens
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
        return _measured(replies, setup.step_sequences * model.sequence_tokens, steps)

    def atom(self, link: Link, speeds: Speeds) -> Reply:
        """Measure ATOM: a new run on unshaped links, then `link` while it trains."""
        peers = self._atoms(speeds)
        setup = self.setup
        rate = link.bits_per_s or UNSHAPED_BITS_PER_S
        run = f"network-{secrets.token_hex(4)}"
        self.network.shape(Link(bits_per_s=None))
        shared = {
            "run": run,
            "local_steps": setup.local_steps,
            "link_bytes_per_s": rate / 8,
            "longest_s": setup.longest_window_s * _LATE_FACTOR,
        }
        try:
            address = self._enter(peers, 0, None, shared)
            for index in range(1, setup.peers):
                self._enter(peers, index, address, shared)
            self.network.shape(link)
            window_s = self._window_s(rate)
            begin_s = time.monotonic() + _AHEAD_S
            start_s = begin_s + setup.settle_s
            replies = peers.tell_all(
                "train",
                self._patience_s(setup.settle_s + window_s + 3 * self._atom_step_s),
                begin_s=begin_s,
                start_s=start_s,
                until_s=start_s + window_s,
                least_steps=2,
            )
            self.network.shape(Link(bits_per_s=None))
            peers.tell_all("leave", _START_S)
        except PeerError:
            # What they were doing is not known; the next link gets new ones.
            peers.close()
            self._atom, self._opened = None, False
            raise
        return self._atom_result(replies, rate)

    def _enter(self, peers: Peers, index: int, join: str | None, shared: dict[str, Any]) -> str:
        address = self.network.address(index)
        reply = peers.tell(index, "enter", _START_S, join=join, address=address, **shared)
        return str(reply["address"])

    def _window_s(self, rate_bits_per_s: float) -> float:
        """Return how long to train: until a round is over, within bounds."""
        setup = self.setup
        fragment_s = 16 * max(self._fragments) / rate_bits_per_s
        due = max(1, setup.local_steps // len(self._fragments))
        round_s = due * self._atom_step_s + 2 * fragment_s
        wanted_s = max(setup.window_s, 1.5 * round_s + 2 * self._atom_step_s)
        return wanted_s if wanted_s <= setup.longest_window_s else setup.window_s

    def _atom_result(self, replies: list[Reply], rate_bits_per_s: float) -> Reply:
        setup = self.setup
        tokens = sum(reply["tokens"] for reply in replies)
        # Peers end at their own step's end: each one's rate is its own, and they add up.
        rates = [r["tokens"] / (r["ended_s"] - r["started_s"]) for r in replies]
        elapsed_s = max(reply["ended_s"] - reply["started_s"] for reply in replies)
        whole_bits = 16 * sum(self._fragments) * 2 * (setup.peers - 1) / setup.peers
        due_s = setup.local_steps * max(r["step_s"] for r in replies)
        whole_s = max(whole_bits / rate_bits_per_s, due_s)
        return {
            "tokens_per_s": sum(rates),
            "sent_bytes_per_token": sum(reply["sent_bytes"] for reply in replies) / tokens,
            "window_s": elapsed_s,
            "rounds_averaged": max(reply["averaged"] for reply in replies),
            "rounds": dict(sum((Counter(r["rounds"]) for r in replies), Counter())),
            "round_s": [s for reply in replies for s in reply["round_s"]],
            "model_averaged_every_s": whole_s,
            "model_averaged_every_tokens": whole_s * sum(rates),
            "link_wait_share": sum(r["link_wait_s"] for r in replies)
            / sum(r["ended_s"] - r["started_s"] for r in replies),
            "device_peak_bytes": max(reply["device_peak_bytes"] for reply in replies),
            "loss": statistics.fmean(loss for reply in replies for loss in reply["losses"]),
        }

    def _baselines(self) -> Peers:
        """Return the baselines' peers in one group, started on unshaped links if need be."""
        if self._gloo is None:
            peers = Peers("gloo", self.network, self.setup.peers, self.folder)
            self._gloo = peers
            self._groups += 1
            try:
                peers.tell_all(
                    "enter",
                    _START_S,
                    lambda rank: {"rank": rank},
                    address=self.network.address(0),
                    port=_GROUP_PORT + self._groups,
                    ranks=self.setup.peers,
                    interface=INTERFACE,
                    timeout_s=self.setup.case_s * _LATE_FACTOR,
                )
            except PeerError:
                self._drop_baselines()
                raise
        return self._gloo

    def _drop_baselines(self) -> None:
        if self._gloo is not None:
            self._gloo.close()
        self._gloo = None

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
            self._fragments = replies[0]["fragment_elements"]
            self._atom_step_s = max(reply["step_s"] for reply in replies)
            self._opened = True
        return peers

    def _start_atom(self) -> Peers:
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
        try:
            replies = self._baselines().tell_all(
                "pipeline",
                self._patience_s((steps + warm_up) * candidate.predicted_s),
                model=self.setup.model.to_json(),
                plan=candidate.plan(),
                sequences=sequences,
                steps=steps,
                warm_up=warm_up,
            )
        except PeerError:
            self._drop_baselines()
            raise
        return _measured(replies, sequences * self.setup.model.sequence_tokens, steps)

    def _patience_s(self, expected_s: float) -> float:
        return 30.0 + _LATE_FACTOR * expected_s


def _measured(replies: list[Reply], tokens_per_step: int, steps: int) -> Measured:
    ended_s = max(reply["ended_s"] for reply in replies)
    elapsed_s = ended_s - min(reply["started_s"] for reply in replies)
    tokens = tokens_per_step * steps
    return Measured(
        tokens / elapsed_s,
        sum(reply["sent_bytes"] for reply in replies) / tokens,
        steps,
        statistics.fmean(loss for reply in replies for loss in reply["losses"]),
    )
