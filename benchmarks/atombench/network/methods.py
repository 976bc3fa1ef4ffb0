"""The methods that `atom bench network` compares, each measured on the link as it is now."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from atombench.common import progress
from atombench.links.peers import PeerError, Peers, Reply
from atombench.links.shaping import INTERFACE, Link, Network, congestion_control
from atombench.network.atom_method import (
    LATE_FACTOR,
    START_S,
    AtomMethod,
    patience_s,
)
from atombench.network.measured import Measured, by_stage, measured
from atombench.network.model import Speeds
from atombench.network.prediction import Candidate
from atombench.network.search import candidates, to_measure
from atombench.network.setup import (
    UNSHAPED_BITS_PER_S,
    NetworkSetup,
)
from atomresearch.simulation.link import BBR, CUBIC, PipelineLink, connection_bits_per_s

_GROUP_PORT = 29_500
_PROBE_S = 0.7
_BOTH_WAYS_S = 3.0
"""Longer: with data both ways a connection takes its time to find the rate of the link."""
_WARM_UP_BELOW_S = 6.0
_WARM_UP_PARALLEL_BELOW_S = 30.0
"""Steps that are longer are warm soon enough; data parallelism has most to do in its first one."""


class Search(NamedTuple):
    """What the search for a pipeline found."""

    best: Candidate
    sequences: int
    """Sequences in a step: fewer than asked for where a step would take too long."""
    predicted_tokens_per_s: float
    full_step_tokens_per_s: float
    """What the best pipeline is predicted to reach with all sequences in a step, however long."""
    considered: int
    measured: Measured
    """The best one's trial."""
    trials: list[dict[str, Any]]
    """`pipeline`, `predicted_tokens_per_s` and `tokens_per_s` (`None`: it failed) of each, and
    `compute_s`: what its ranks compute in a step, measured before, and `own_compute_s`, meanwhile.
    """


class Methods:
    """Keeps the peers of all methods between links; a context that ends them."""

    def __init__(self, setup: NetworkSetup, network: Network, folder: Path) -> None:
        self.setup, self.network, self.folder = setup, network, folder
        self._gloo: Peers | None = None
        self._groups = 0
        self._control = congestion_control()
        self.atom = AtomMethod(setup, network, folder)

    def __enter__(self) -> Methods:
        progress("starting the peers")
        try:
            # Both kinds import their packages before anything is measured.
            self.atom.start()
            self._baselines()
            self.atom.start().tell_all("hello", START_S)
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
        self.atom.close()
        if self._gloo is not None:
            self._gloo.close()
        self._gloo = None

    def speeds(self) -> Speeds:
        """Measure how fast the peers compute, all at once, without any network."""
        tried = self.setup.model.micro_batches_tried
        sizes = [size for size in tried if self.setup.step_sequences % size == 0]
        replies = self._baselines().tell_all(
            "speeds", START_S, model=self.setup.model.to_json(), micro_batches=sizes
        )
        return Speeds.of(replies)

    def congestion(self, link: Link) -> str:
        """Have the baselines use the congestion control that ATOM's streams use on such a link.

        Returns:
            Its name; this machine's where the kernel refuses.
        """
        self._control = BBR if link.loss_share else CUBIC
        self._control = self._baselines().tell_all("congestion", START_S, control=self._control)[0][
            "control"
        ]
        return self._control

    def probe(self, link: Link) -> Reply:
        """Measure round trip, rate, and rate both ways of the link between two peers."""
        rate = link.bits_per_s or UNSHAPED_BITS_PER_S
        rate = connection_bits_per_s(rate, link.round_trip_s, link.loss_share, self._control)
        probe_bytes, both_ways_bytes = (
            min(64 << 20, max(16 << 10, int(rate * lasting_s / 8)))
            for lasting_s in (_PROBE_S, _BOTH_WAYS_S)
        )
        replies = self._baselines().tell_all(
            "probe",
            60 + 10 * 8 * (probe_bytes + both_ways_bytes) / rate,
            probe_bytes=probe_bytes,
            both_ways_bytes=both_ways_bytes,
        )
        return next(reply for reply in replies if reply)

    def search(self, way: PipelineLink, speeds: Speeds, until_s: float) -> Search:
        """Find the best pipeline for a link that is such a `way`, and shaped already.

        No trial is begun after `until_s`.

        Raises:
            PeerError: none of the trials ended.
        """
        setup = self.setup
        sequences = setup.step_sequences
        ranked = self._ranked(sequences, speeds, way)
        full_rate = sequences * setup.model.sequence_tokens / ranked[0].predicted_s
        while ranked[0].predicted_s > setup.longest_step_s and sequences > 2 * setup.peers:
            sequences //= 2
            ranked = self._ranked(sequences, speeds, way)
        trials: list[dict[str, Any]] = []
        ran: list[tuple[Measured, Candidate]] = []
        for candidate in to_measure(ranked, setup.model, setup.peers)[: setup.trials]:
            if ran and time.monotonic() > until_s:
                break
            compute_s = self._compute_s(candidate, sequences)
            found = self._trial(candidate, sequences)
            if found is not None:
                ran.append((found, candidate))
            tokens = sequences * setup.model.sequence_tokens
            predicted = tokens / candidate.predicted_s
            trials.append(
                {
                    "pipeline": candidate.name(),
                    "predicted_tokens_per_s": predicted,
                    "compute_s": compute_s,
                    "tokens_per_s": found and found.tokens_per_s,
                    "own_compute_s": found and found.compute_s,
                }
            )
        if not ran:
            raise PeerError("no pipeline ran on this link; see standard error for the reasons")
        measured_best, best = max(ran, key=lambda pair: pair[0].tokens_per_s)
        rate = tokens / best.predicted_s
        return Search(best, sequences, rate, full_rate, len(ranked), measured_best, trials)

    def pipeline(self, search: Search, seconds: float) -> Measured:
        """Measure the pipeline that was found for about `seconds`."""
        steps = max(1, round(seconds / search.best.predicted_s))
        return self._pipeline(search.best, search.sequences, steps)

    def pipeline_memory(self, search: Search) -> int:
        """Return the device bytes of the peer that needs most, counted in a step without network.

        PyTorch's own schedules keep what ours keep with as many micro-batches in flight.
        """
        replies = self._dry("pipeline_memory", search.best, search.sequences)
        return max(int(reply["device_peak_bytes"]) for reply in replies)

    def data_parallel(self, link: Link, speeds: Speeds) -> Measured | str:
        """Measure averaging in every step, or return why it was left out."""
        model = self.setup.model
        compute_s = model.tokens_per_step / speeds.tokens_per_s(model)
        inputs = {"micro_batch": speeds.best_size(model)}
        return self._averaged("data_parallel", link, compute_s, inputs)

    def swapped_parallel(self, link: Link, speeds: Speeds) -> Measured | str:
        """Measure the same of ATOM's engine, within its budget, or return why it was left out.

        Its micro-batch is that of ATOM, which is the engine's best.
        """
        inputs = self.atom.engine_inputs(speeds)
        return self._averaged("swapped_parallel", link, self.atom.step_s, inputs)

    def _averaged(
        self, do: str, link: Link, compute_s: float, inputs: dict[str, Any]
    ) -> Measured | str:
        """Measure a method that averages float32 gradients in every step."""
        setup, model = self.setup, self.setup.model
        rate = connection_bits_per_s(
            link.bits_per_s or UNSHAPED_BITS_PER_S,
            link.round_trip_s,
            link.loss_share,
            self._control,
        )
        wire_bits = 32 * model.parameters * 2 * (setup.peers - 1) / setup.peers
        step_s = compute_s + wire_bits / rate
        if step_s > setup.longest_step_s:
            return f"a step would take at least {step_s:.0f} s"
        steps = max(1, round(setup.window_s / step_s))
        warm_up = int(step_s < _WARM_UP_PARALLEL_BELOW_S)
        replies = self._baselines().tell_all(
            do,
            START_S + patience_s((steps + warm_up) * step_s),
            model=model.to_json(),
            steps=steps,
            warm_up=warm_up,
            **inputs,
        )
        return measured(replies, setup.step_sequences * model.sequence_tokens, steps, warm_up)

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
                START_S,
                lambda rank: {"rank": rank},
                address=self.network.address(0),
                port=_GROUP_PORT + self._groups,
                ranks=self.setup.peers,
                interface=INTERFACE,
                timeout_s=self.setup.case_s * LATE_FACTOR,
            )
            self._gloo.tell_all("congestion", START_S, control=self._control)
        return self._gloo

    def _ranked(self, sequences: int, speeds: Speeds, way: PipelineLink) -> list[Candidate]:
        setup, cores = self.setup, len(os.sched_getaffinity(0))
        return candidates(
            setup.model, setup.peers, sequences, speeds, way, setup.budget_bytes, cores
        )

    def _compute_s(self, candidate: Candidate, sequences: int) -> list[float]:
        """Return a core's seconds for each stage's operations of a step, all peers at once.

        PyTorch's own schedules compute what ours do. Of pipelines side by side it is the mean.
        """
        return [*by_stage(self._dry("pipeline_compute", candidate, sequences), candidate.pipelines)]

    def _dry(self, do: str, candidate: Candidate, sequences: int) -> list[Reply]:
        """Have all peers do something with a step of a pipeline that uses no network."""
        return self._baselines().tell_all(
            do,
            START_S,
            lambda rank: {"rank": rank},
            model=self.setup.model.to_json(),
            plan=candidate.plan(),
            sequences=sequences,
            ranks=self.setup.peers,
        )

    def _trial(self, candidate: Candidate, sequences: int) -> Measured | None:
        steps = max(1, min(4, round(self.setup.trial_s / candidate.predicted_s)))
        try:
            return self._pipeline(candidate, sequences, steps)
        except PeerError as error:
            progress(f"a pipeline failed ({candidate.name()}): {error}")
            return None

    def _pipeline(self, candidate: Candidate, sequences: int, steps: int) -> Measured:
        warm_up = int(candidate.predicted_s < _WARM_UP_BELOW_S)
        replies = self._baselines().tell_all(
            "pipeline",
            patience_s((steps + warm_up) * candidate.predicted_s),
            model=self.setup.model.to_json(),
            plan=candidate.plan(),
            sequences=sequences,
            steps=steps,
            warm_up=warm_up,
        )
        tokens = sequences * self.setup.model.sequence_tokens
        found = measured(replies, tokens, steps, warm_up)
        return found._replace(compute_s=by_stage(replies, candidate.pipelines))
