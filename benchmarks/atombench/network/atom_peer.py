"""One peer of ATOM for `atom bench network`: engine and swarm, joined as in the training loop."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import atomtrain
from atombench.averaging.costs import CodecTime
from atombench.links.connections import sent_bytes
from atombench.links.peers import Reply
from atombench.network.model import ModelSetup, fused_adamw
from atomtrain.errors import PlanError
from atomtrain.swarm import Endpoint, Manifest, Rules, Swarm, SwarmConfig
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.membership.records import TRAINING
from atomtrain.swarm.membership.rules import MEASURED
from atomtrain.swarm.rounds.leader_io import exchange_bytes
from atomtrain.swarm.transport.libp2p import import_hivemind
from atomtrain.training.setup.peering import EngineFragments, most_fragments

_LEAVE_S = 3.0
_LOOK_S = 0.1
_UNTIMED_STEPS = 2
"""Steps with which an engine is timed when it is opened: they train, too."""


class AtomPeer:
    """Swaps the model through an emulated device and averages in the background."""

    def __init__(self) -> None:
        self._step = 0
        self.engine: Any = None
        self._swarm: Swarm | None = None
        self._codec_time = CodecTime()
        self._watching = contextlib.ExitStack()

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        return {
            "hello": self.hello,
            "open": self.open,
            "enter": self.enter,
            "meet": self.meet,
            "train": self.train,
            "leave": self.leave,
        }

    def hello(self) -> Reply:
        """Import what takes long."""
        import_hivemind()

        return {}

    def open(
        self,
        model: dict[str, Any],
        seed: int,
        micro_batch: int,
        device_link_bytes_per_s: float,
        device_memory_bytes: int,
    ) -> Reply:
        """Build the engine, in place of any other; this peer's samples are those of `seed`.

        Returns a step's seconds and the plan, or in `refused` why there is none.
        """
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.setup = ModelSetup.from_json(model)
        self._seed, self._micro_batch, self._step = seed, micro_batch, 0
        batches = self._batches()
        try:
            self.engine = atomtrain.swap(
                self.setup.model(),
                batches[0],
                optimizer=lambda ps: fused_adamw(ps, self.setup.learning_rate),
                device=f"emulated:{int(device_link_bytes_per_s)}B/s",
                device_memory=device_memory_bytes,
                options=atomtrain.Options(micro_batches=len(batches)),
            )
        except PlanError as error:
            return {"refused": str(error)}
        self.fragments = EngineFragments(self.engine)
        for _ in range(_UNTIMED_STEPS):
            started_s = time.monotonic()
            self.engine.step(batches)
            self.engine.synchronize()
        return {
            "refused": "",
            "step_s": time.monotonic() - started_s,
            "plan": self.engine.plan.describe(),
        }

    def enter(
        self,
        run: str,
        peers: int,
        address: str,
        join: str | None,
        local_steps: int,
        wire: str,
        link_bytes_per_s: float,
        count_codecs: bool = False,
    ) -> Reply:
        """Found a run of `peers` on this host's address, or join one.

        `local_steps` may be `MEASURED`. With `count_codecs` what wire formats take of the processor
        is told by `train`. Returns the address for others, and what an exchange of each fragment
        takes.
        """
        if local_steps == MEASURED:  # fragments as `atom train` makes them then
            most = most_fragments(self.engine, local_steps)
            self.fragments = EngineFragments(self.engine, most=most)
        if count_codecs:
            self._watching.enter_context(self._codec_time.counted())
        config = SwarmConfig(
            run=run,
            rules=Rules(local_steps_per_round=local_steps, wire=wire),
            endpoint=Endpoint(listen_host=address),
            join=() if join is None else (join,),
            slowest_link_bytes_per_s=link_bytes_per_s,
        )
        if join is None:
            manifest = Manifest(run, self.fragments.elements)
            self._swarm = Swarm.found(config, manifest, self.fragments)
        else:
            self._swarm = Swarm.join(config)
            self._swarm.download(self.fragments)
        context = self._swarm._service.context
        count = len(self.fragments.elements)
        return {
            "address": self._swarm.address,
            "exchange_bytes": [exchange_bytes(context, index, peers) for index in range(count)],
        }

    def meet(self, peers: int, patience_s: float) -> Reply:
        """Wait until this peer knows that so many, itself included, take part; not for ever.

        A round begun before would leave somebody out. Returns how many are known.
        """
        assert self._swarm is not None
        until_s = time.monotonic() + patience_s
        while True:
            known = sum(peer.state == TRAINING for peer in self._swarm.peers())
            if known >= peers or time.monotonic() >= until_s:
                return {"known": known}
            time.sleep(_LOOK_S)

    def train(
        self,
        begin_s: float,
        start_s: float,
        until_s: float,
        least_steps: int,
        upload: float = 0,
        round_until_s: float = 0,
    ) -> Reply:
        """Train from `begin_s` until `until_s` (this machine's monotonic clock).

        Steps that begin before `start_s` are not counted; `before_steps` is their number, with the
        steps when the engine was opened. `compute_s` is what a step's computation took of a core:
        what others have of it does not count; `processor_s` is that of all threads. `codec_s` is
        what wire formats took in all steps together, if counted. `upload` is the limit on what is
        sent, in bytes a second; 0: none. Until a round has ended it goes on, but only to
        `round_until_s`.
        """
        if self._swarm is not None:
            self._swarm.limit_upload(upload or math.inf)
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before_steps = _UNTIMED_STEPS
        while time.monotonic() < start_s:
            self._train_step()
            before_steps += 1
        self.engine.synchronize()
        before_bytes, started_s = sent_bytes(), time.monotonic()
        before_core_s, before_all_s = time.thread_time(), time.process_time()
        before_codec_s = self._codec_time.spent_s
        reports: list[RoundReport] = []
        losses: list[float] = []
        wait_s = 0.0
        while (
            time.monotonic() < (until_s if _averaged(reports) else max(until_s, round_until_s))
            or len(losses) < least_steps
        ):
            loss, ended = self._train_step()
            losses.append(loss)
            reports += ended
            assert self.engine.last is not None
            wait_s += self.engine.last.link_wait_s
        self.engine.synchronize()
        ended_s, core_s = time.monotonic(), time.thread_time() - before_core_s
        all_s = time.process_time() - before_all_s
        averaged = _averaged(reports)
        assert self.engine.last is not None
        return {
            "started_s": started_s,
            "ended_s": ended_s,
            "before_steps": before_steps,
            "steps": len(losses),
            "step_s": (ended_s - started_s) / len(losses),
            "compute_s": core_s / len(losses),
            "processor_s": all_s / len(losses),
            "codec_s": self._codec_time.spent_s - before_codec_s,
            "steps_per_round": self._steps_per_round(),
            "tokens": len(losses) * self._tokens,
            "sent_bytes": sent_bytes() - before_bytes,
            "rounds": dict(Counter(report.outcome for report in reports)),
            "reasons": sorted({report.reason for report in reports if report.reason}),
            "averaged": len(averaged),
            "round_s": [report.duration_s for report in averaged],
            "round_fragments": [report.fragment for report in averaged],
            "round_peers": [len(report.contributors) for report in averaged],
            "link_wait_s": wait_s,
            "device_peak_bytes": self.engine.last.device_peak_bytes,
            "losses": losses,
        }

    def leave(self) -> Reply:
        """Leave the run; the engine stays."""
        if self._swarm is not None:
            self._swarm.leave(_LEAVE_S)
            self._swarm = None
            self._watching.close()
            self.fragments = EngineFragments(self.engine)
        return {}

    def _steps_per_round(self) -> int | None:
        """Return this peer's steps from one round to the next as they are now; None: alone."""
        if self._swarm is None:
            return None
        return self._swarm._service.context.agenda.steps_per_fragment

    @property
    def _tokens(self) -> int:
        return self.setup.sequences_per_peer * self.setup.sequence_tokens

    def _train_step(self) -> tuple[float, list[RoundReport]]:
        loss = self.engine.step(self._batches())
        assert self.engine.last is not None
        if self._swarm is None:
            return loss, []
        step_s = self.engine.last.step_s
        reports = self._swarm.boundary(
            steps=1,
            tokens=self._tokens,
            tokens_per_s=self._tokens / step_s,
            step_s=step_s,
            access=self.fragments,
        )
        return loss, reports

    def _batches(self) -> list[Any]:
        self._step += 1
        sequences = self.setup.sequences_per_peer
        return self.setup.micro_batches(
            self._step * 1000 + self._seed, sequences, self._micro_batch
        )


def _averaged(reports: list[RoundReport]) -> list[RoundReport]:
    """Return the rounds that ended with a mean of several peers."""
    return [report for report in reports if len(report.contributors) > 1]
