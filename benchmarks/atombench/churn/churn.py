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
- `hung_at_the_end`: peers that had not saved and left two minutes after they were asked to.
- `rejoin_s`, `averages_s`: median seconds from starting a newcomer's process to its first step, and
  to the end of the first round in which it averaged with others, importing packages included
  unless peers are so many that they are forks (see `ChurnSetup.crowded`).
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

Asked to end before its time (SIGINT, SIGTERM), it kills nobody any more, has the peers save and
leave, and tells what it has: `complete` is false then, and `kills` are those that were made.
"""

from __future__ import annotations

import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atombench import forks
from atombench.churn.check import checked, seen
from atombench.churn.peers import ChurnPeer, Crowd, until_this_ends
from atombench.common import (
    BenchmarkOptions,
    Result,
    description,
    keep_partial,
    progress,
    requests_noted,
    terminable,
)
from atomtrain.data.corpus import read_corpus
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
    def crowded(self) -> bool:
        """Whether so many peers share a core that starting one holds up all others.

        Each is then a fork of a process that has imported everything: on machines of their own
        they would import at the same time.
        """
        return self.peers > (os.cpu_count() or 1) + 1

    @property
    def device(self) -> str:
        """What `atom train` is told to train on."""
        return f"emulated:{self.slow_link}" if self.crowded else "emulated"

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
    inputs = {
        **asdict(setup),
        "data": data or "demo",
        "model": "tiny",
        "device": setup.device,
        "forked": setup.crowded,
    }
    about = {"inputs": inputs, **description()}
    with tempfile.TemporaryDirectory(prefix="atom-churn-") as folder, terminable():
        arguments = _arguments(setup, data)
        popen = forks.Popen if setup.crowded else until_this_ends
        with Crowd(Path(folder), _RUN, arguments, witness=True, popen=popen) as crowd:
            churn = _Churn(setup, crowd, lambda now: keep_partial({**now, **about}, options.out))
            churn.gather()
            with requests_noted() as churn.asked:
                churn.churn()
            left = churn.end()
            left_over = crowd.left_over()
            result = {"complete": churn.complete, **churn.seen(), **checked(crowd.peers, left)}
        return {**result, "processes_left": len(left_over), **about}


class _Churn:
    """One run of the benchmark: gather, churn, end."""

    def __init__(
        self, setup: ChurnSetup, crowd: Crowd, keep: Callable[[Result], None] = lambda _: None
    ) -> None:
        """`keep` gets what was seen so far after each kill."""
        self.setup, self.crowd, self._keep = setup, crowd, keep
        self.asked: Callable[[], bool] = lambda: False
        """Says whether somebody wants it to end before its time."""
        self.complete = False
        """Whether all kills were made, and were survived long enough to be judged."""
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
        """Kill and replace, to the end or until asked to end."""
        killed = 0
        while killed < self.setup.kills:
            pause_s = self.chance.uniform(*self.setup.pause_s)
            if self.chance.random() >= self.setup.early_share:
                self._wait_for_newcomers()
            self._wait(lambda: False, pause_s)
            if self.asked():
                progress(f"{self._elapsed_s():4.0f} s: asked to end; peers save and leave")
                return
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
            self._keep(self.seen())
        self._wait_for_newcomers()
        self._wait(lambda: False, self.setup.settle_s)
        self.complete = not self.asked()

    def end(self) -> list[ChurnPeer]:
        """Have all peers save and leave; return those that did."""
        return self.crowd.interrupt(_SAVED_S)

    def seen(self) -> Result:
        """Return what the events told so far."""
        return {
            **seen(self.crowd.peers, self.newcomers, self.late),
            "longest_lag_s": self.crowd.longest_lag_s,
            "duration_s": self._elapsed_s(),
        }

    def _wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        return self.crowd.wait(lambda: condition() or self.asked(), within_s)

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
        self._wait(lambda: all(p.averages for p in self.crowd.running()), self.setup.start_s)
        if self.asked():
            return
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


def _arguments(setup: ChurnSetup, data: str | None) -> list[str]:
    rates = ["--steps", str(_STEPS), "--evaluate-every", "500", "--checkpoint-every", "200"]
    # The witness does the sum again: of means that no outer update changes.
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
