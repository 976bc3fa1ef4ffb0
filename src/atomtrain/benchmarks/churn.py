"""Peers are killed and replaced while they train: does the swarm stop, or average wrongly?

Three real `atom train` processes, one thread each, train the tiny model on real text over
loopback. Again and again random ones of them get `kill -9` (the founder too, and peers that are
still joining), and new ones are started that join through random survivors. Three kills of four
wait, for some random seconds, from when every newcomer has averaged with others. The seed fixes
victims, pauses and addresses; what a kill hits also depends on the machine.

What is measured, from the survivors' event streams:

- `longest_stop_s`: longest time between two steps of one peer, evaluations and checkpoints
  included; up to its end if it was killed or stopped.
- `longest_lag_s`: for comparison, by how much the benchmark's own process, which only sleeps and
  reads, was late at most. On a machine with nothing to spare it explains part of the above.
- `longest_round_s`: longest time from a round's invitation to its decision, at any member.
- `hangs`: stops of 30 s or more, and newcomers that had not averaged with others by the deadline.
- `rejoin_s`, `averages_s`: median seconds from starting a newcomer's process to its first step, and
  to the end of the first round in which it averaged with others, importing packages included.
- `loss_first`, `loss_last`: mean training loss of the first and last tenth of all peers' steps.
- `wrong_means`: the sum of three counts.
  `means.wrong`: parts of rounds whose result is not the token-weighted mean of what the members
  had contributed. Each peer is the ordinary command with a witness that notes, at 256 elements of
  the fragment, its contribution and what the anchor became; the sums are done again here.
  `disagreements.lasting`: pairs of peers that reported different hashes for the same version of a
  fragment, at any time, and did not come to hold the same again by the swarm's rule (more
  tokens win, then the higher version, then the lower hash).
  `last_anchors_unequal`: pairs of anchors of equal version that differ in any bit in the
  checkpoints that the last peers write on leaving.

What this does not prove: of the mean, elements in between (but anchors are compared in full, so
they would have to be wrong alike everywhere), and rounds of which a contributor was killed before
it could note its part (`means.unknown`). A pair that disagreed of which one ended within 30 s shows
nothing either way (`disagreements.cut_short`).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from atomtrain.benchmarks.churn_check import (
    HANG_S,
    averaging_times,
    compare_checkpoints,
    disagreements,
    first_and_last_loss,
    rejoin_times,
    stops,
)
from atomtrain.benchmarks.churn_peers import ChurnPeer, Crowd
from atomtrain.benchmarks.churn_witness import check_means, read_notes
from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.data import read_corpus
from atomtrain.errors import ConfigError, DataError, SwarmError

_RUN = "churn"
_STEPS = 1_000_000  # more than any machine makes meanwhile: the rate stays at its peak
_SAVED_S = 120.0
"""By when all peers must have saved and left."""


@dataclass(frozen=True, kw_only=True)
class ChurnSetup:
    """Inputs of the benchmark."""

    peers: int = 3
    """Peers at any time; at least 2."""
    kills: int = 20
    """At least 1."""
    at_once: int = 1
    """Peers that are killed at the same time; fewer than `peers`. One that trains is left."""
    pause_s: tuple[float, float] = (1.0, 6.0)
    """Least and most seconds from when newcomers take part, or from their start, to the next kill;
    above 0."""
    early_share: float = 0.25
    """Share of kills that do not wait until all newcomers have averaged with others, and so may hit
    them while they join; 0 to 1."""
    start_s: float = 120.0
    """By when a peer must have made its first step, and a newcomer have averaged with others."""
    settle_s: float = 12.0
    """From the last newcomer's first average to the end: the last 10% of the losses need some."""
    local_steps: int = 10
    """Steps in which every fragment is averaged once."""
    slow_link: str = "1.5MiB/s"
    """Link of the emulated devices where peers outnumber cores: each waits for its own then, and
    not for a processor that others have, as on machines of their own."""
    seed: int = 0

    @property
    def device(self) -> str:
        """What `atom train` is told to train on."""
        outnumber = self.peers > (os.cpu_count() or 1) + 1
        return f"emulated:{self.slow_link}" if outnumber else "emulated"

    def __post_init__(self) -> None:
        if self.peers < 2 or self.kills < 1:
            raise ConfigError(f"at least 2 peers and 1 kill, not {self.peers} and {self.kills}")
        if not 0 < self.at_once < self.peers:
            raise ConfigError(f"1 to {self.peers - 1} of them can be killed at once, not "
                              f"{self.at_once}")  # fmt: skip
        if not 0 < self.pause_s[0] <= self.pause_s[1]:
            raise ConfigError(f"pause_s must be two ascending positive times, not {self.pause_s}")


QUICK = ChurnSetup(kills=4, pause_s=(0.5, 2.0), early_share=0.5, settle_s=2.0)


def run(options: BenchmarkOptions, setup: ChurnSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` chooses fewer kills.
        setup: Inputs of one's own.

    Raises:
        SwarmError: the peers could not be started at all.
    """
    setup = setup or (QUICK if options.quick else ChurnSetup())
    setup = replace(
        setup,
        peers=options.peers or setup.peers,
        kills=options.kills or setup.kills,
        at_once=options.at_once or setup.at_once,
    )
    data = _text()
    with tempfile.TemporaryDirectory(prefix="atom-churn-") as folder, _terminable():
        arguments = _arguments(setup, data)
        with Crowd(Path(folder), _RUN, arguments, witness=True) as crowd:
            churn = _Churn(setup, crowd)
            churn.gather()
            churn.churn()
            saved = churn.end()
            left_over = crowd.left_over()
            measured = _measured(churn, saved)
        return {
            **measured,
            "processes_left": len(left_over),
            "inputs": {
                **asdict(setup),
                "data": data or "demo",
                "model": "tiny",
                "device": setup.device,
            },
            **description(),
        }


class _Churn:
    """One run of the benchmark: gather, churn, end."""

    def __init__(self, setup: ChurnSetup, crowd: Crowd) -> None:
        self.setup, self.crowd = setup, crowd
        self.chance = random.Random(setup.seed)
        self.newcomers: list[ChurnPeer] = []
        """Those that took the place of killed ones."""
        self.late: list[ChurnPeer] = []
        """Those that had not averaged with others by their deadline."""
        self.started_s = time.monotonic()

    def gather(self) -> None:
        """Start the founder, then the others through it; return when all train."""
        founder = self.crowd.start()
        self._wait_training([founder])
        self._wait_training(
            [self.crowd.start(founder.address) for _ in range(self.setup.peers - 1)]
        )
        progress(f"{self.setup.peers} peers train after {self._elapsed_s():.0f} s")

    def churn(self) -> None:
        """Kill and replace."""
        killed = 0
        while killed < self.setup.kills:
            pause_s = self.chance.uniform(*self.setup.pause_s)
            if self.chance.random() >= self.setup.early_share:
                self._wait_for_newcomers()
            self.crowd.wait(lambda: False, pause_s)
            self._replace_the_dead()
            victims = self._victims(min(self.setup.at_once, self.setup.kills - killed))
            told = [f"{v.name} ({'training' if v.training else 'joining'})" for v in victims]
            self.crowd.kill(*victims)
            killed += len(victims)
            newcomers = [self._start_newcomer().name for _ in victims]
            progress(
                f"{self._elapsed_s():4.0f} s: kill {killed} of {self.setup.kills}: "
                f"{', '.join(told)}; {', '.join(newcomers)} joins"
            )
        self._wait_for_newcomers()
        self.crowd.wait(lambda: False, self.setup.settle_s)

    def end(self) -> list[ChurnPeer]:
        """Have all peers save and leave; return those that did."""
        return self.crowd.interrupt(_SAVED_S)

    def _victims(self, count: int) -> list[ChurnPeer]:
        """Choose whom to kill at once; one that trains is left: with the last the run would end."""
        self.crowd.read()
        running = self.crowd.running()
        training = [peer for peer in running if peer.training]
        if not training:
            raise SwarmError(f"no peer is left that trains; {self._last_words()}")
        left = self.chance.choice(training)
        others = [peer for peer in running if peer is not left]
        return self.chance.sample(others, min(count, len(others)))

    def _start_newcomer(self) -> ChurnPeer:
        self.crowd.read()
        training = [peer for peer in self.crowd.running() if peer.training]
        self.newcomers.append(self.crowd.start(self.chance.choice(training).address))
        return self.newcomers[-1]

    def _replace_the_dead(self) -> None:
        """Start anew for peers that ended by themselves, such as by a failed join."""
        while len(self.crowd.running()) < self.setup.peers:
            newcomer = self._start_newcomer()
            progress(f"{self._elapsed_s():4.0f} s: {newcomer.name} for a peer that ended by itself")

    def _wait_for_newcomers(self) -> None:
        """Wait until all that run have averaged; who has not by the deadline counts as a hang."""
        self.crowd.wait(lambda: all(p.averages for p in self.crowd.running()), self.setup.start_s)
        for peer in self.crowd.running():
            if not peer.averages and peer not in self.late:
                self.late.append(peer)
                progress(f"{self._elapsed_s():4.0f} s: {peer.name} does not average yet")

    def _wait_training(self, peers: list[ChurnPeer]) -> None:
        ready = self.crowd.wait(
            lambda: all(p.training or not p.running for p in peers), self.setup.start_s
        )
        if not ready or not all(peer.training for peer in peers):
            raise SwarmError(f"the peers could not be started: {self._last_words()}")

    def _last_words(self) -> str:
        ended = [peer for peer in self.crowd.peers if not peer.killed]
        return "; ".join(f"{peer.name}: {peer.last_words()}" for peer in ended)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


def _measured(churn: _Churn, saved: list[ChurnPeer]) -> Result:
    crowd = churn.crowd
    stood = stops(crowd.peers)
    before_s = stood.from_s - crowd.peers[0].started_s
    progress(
        f"longest stop: {stood.peer}, {stood.longest_s:.1f} s, {before_s:.0f} s after the start"
    )
    failed = [p for p in crowd.peers if not p.killed and p not in saved]
    for peer in failed:
        progress(f"{peer.name} ended by itself: {peer.last_words()}")
    times_s, averaging_s = rejoin_times(churn.newcomers), averaging_times(churn.newcomers)
    first, last = first_and_last_loss(crowd.peers)
    differing = disagreements(crowd.peers)
    for item in differing:
        progress(f"disagreement: {item}")
    outcomes = Counter(item.outcome for item in differing)
    anchors = compare_checkpoints(peer.folder / "checkpoints" for peer in saved)
    means = check_means((p.peer_id, n) for p in crowd.peers for n in read_notes(p.notes))
    rounds = Counter(e["outcome"] for p in crowd.peers for e in p.of("round"))
    together = [e for p in crowd.peers for e in p.of("round") if e["contributors"] > 1]
    return {
        "kills": sum(peer.killed for peer in crowd.peers),
        "kills_while_joining": sum(p.killed and not p.of("step") for p in crowd.peers),
        "kills_before_averaging": sum(p.killed and p.first_average_s is None for p in crowd.peers),
        "founder_killed": crowd.peers[0].killed,
        "hangs": stood.hangs + len(churn.late),
        "hang_s": HANG_S,
        "wrong_means": means.wrong + outcomes["lasting"] + anchors.unequal,
        "means": means._asdict(),
        "disagreements": {
            "repaired": outcomes["repaired"],
            "cut_short": outcomes["cut short"],
            "lasting": outcomes["lasting"],
        },
        "last_anchors_compared": anchors.compared,
        "last_anchors_unequal": anchors.unequal,
        "longest_stop_s": stood.longest_s,
        "longest_lag_s": crowd.longest_lag_s,
        "rejoin_s": statistics.median(times_s) if times_s else None,
        "rejoins": len(times_s),
        "averages_s": statistics.median(averaging_s) if averaging_s else None,
        "rejoins_that_averaged": len(averaging_s),
        "ended_by_themselves": len(failed),
        "loss_first": first,
        "loss_last": last,
        "steps": sum(len(peer.of("step")) for peer in crowd.peers),
        "rounds": dict(rounds),
        "rounds_of_several": len(together),
        "longest_round_s": max((e["duration_s"] for e in together), default=None),
        "duration_s": churn._elapsed_s(),
    }


def _arguments(setup: ChurnSetup, data: str | None) -> list[str]:
    rates = ["--steps", str(_STEPS), "--evaluate-every", "500", "--checkpoint-every", "200"]
    # The witness does the sum again: of plain means.
    averaging = ["--local-steps", str(setup.local_steps), "--outer", "mean"]
    averaging += ["--seed", str(setup.seed)]
    text = [] if data is None else ["--data", data]
    return ["--model", "tiny", "--device", setup.device, *rates, *averaging, *text]


def _text() -> str | None:
    """Return what to train on: the demo corpus if it is installed, else Python's own source."""
    try:
        read_corpus(None)
    except DataError:
        return str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")
    return None


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into the exception of Ctrl-C, so that the peers are ended as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
