"""Benchmark `averaging`: how long peers take to average a vector, against hivemind and the link.

Each peer is a process of its own. On loopback rounds of ATOM and of hivemind's averager take turns
in the same run, both encrypted and without a codec; of hivemind's the time is counted from where
its group has been found, with the best of several part sizes; of ATOM's from the proposal of the
round until the parameters hold the mean, for which the caller waits as hivemind's does. On a slow
link (namespaces with a rate and a delay) the floor is what 2 (K - 1) / K times the vector takes at
the rate of a raw TCP stream in the same run.
The *mesh* is what it takes when all peers send to all others at once over raw TCP, between the
rounds: what this network and this machine allow, with nothing encrypted, added up or agreed on.
*Streams* are the same over the encrypted channels that rounds use: what is above that is what peers
compute and agree on. A last round, with clocks in it, tells what processors did (`costs`).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atombench.averaging.result import streams_result
from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.links.peers import PeerError, Peers
from atombench.links.shaping import Link, Network
from atomtrain.errors import ConfigError

_START_S = 90.0
_TRIES = 3
_LOOPBACK = "127.0.0.1"
_PATIENT_BYTES_PER_S = 2e7
"""What deadlines on loopback are based on: no round shall run into one."""
_ERROR_MAX = 1e-3
"""Of sums of numbers below some hundreds."""


@dataclass(frozen=True, kw_only=True)
class AveragingSetup:
    """Inputs of the benchmark."""

    peers: int = 4
    elements: int = 25_000_000
    """float32: 100 MB."""
    rounds: int = 6
    """Measured on loopback, after one that warms up."""
    slow_rounds: int = 3
    """Measured on the slow link, after one."""
    slow_bits_per_s: float = 1e8
    slow_round_trip_s: float = 0.05
    slow_loss_share: float = 0.0
    """Packets that the slow link loses at random."""
    probe_bytes: int = 25_000_000
    part_bytes: tuple[int, ...] = (1 << 19, 1 << 21)
    """hivemind: sizes of parts that are tried, its default first; none: it is left out."""

    def __post_init__(self) -> None:
        if self.peers < 2 or self.rounds < 1 or self.slow_rounds < 0:
            raise ConfigError("averaging takes at least 2 peers and 1 round")

    @property
    def bytes(self) -> int:
        """Size of the vector."""
        return 4 * self.elements

    @property
    def moved_bytes(self) -> float:
        """What each peer must send, and receive, at least."""
        return 2 * (self.peers - 1) / self.peers * self.bytes


QUICK = AveragingSetup(
    elements=2_000_000, rounds=2, slow_rounds=1, probe_bytes=4_000_000, part_bytes=(1 << 19,)
)


def run(options: BenchmarkOptions, setup: AveragingSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract.

    The top level is loopback; `slow_link` has the same keys.

    Raises:
        ConfigError: this machine or user cannot make network namespaces.
        PeerError: a peer failed.
    """
    setup = setup or (QUICK if options.quick else AveragingSetup())
    with tempfile.TemporaryDirectory(prefix="atom-averaging-") as folder:
        hosts = [_LOOPBACK] * setup.peers
        fast = _measure(setup, None, hosts, Path(folder), setup.rounds, _PATIENT_BYTES_PER_S)
        slow = _measure_slow(setup, Path(folder)) if setup.slow_rounds else None
    return {
        "peers": setup.peers,
        "bytes": setup.bytes,
        **fast,
        "slow_link": slow,
        "inputs": asdict(setup),
        **description(),
    }


def _measure_slow(setup: AveragingSetup, folder: Path) -> Result:
    with Network(setup.peers) as network:
        network.shape(
            Link(
                bits_per_s=setup.slow_bits_per_s,
                round_trip_s=setup.slow_round_trip_s,
                loss_share=setup.slow_loss_share,
            )
        )
        hosts = [network.address(index) for index in range(setup.peers)]
        rate = setup.slow_bits_per_s / 16
        return _measure(setup, network, hosts, folder, setup.slow_rounds, rate)


def _measure(
    setup: AveragingSetup,
    network: Network | None,
    hosts: list[str],
    folder: Path,
    rounds: int,
    link_bytes_per_s: float,
) -> Result:
    where = "loopback" if network is None else "the slow link"
    with Peers("averaging", network, setup.peers, folder) as ours:
        ours.tell_all("hello", _START_S)
        rate = _probe(ours, setup, hosts)
        progress(f"{where}: raw TCP {rate / 1e6:.1f} Mbit/s")
        _enter(ours, setup, hosts, link_bytes_per_s)
        _open_mesh(ours, setup, hosts)
        measured: dict[str, list[Result]] = {"rounds": [], "plain": [], "encrypted": []}
        their_rounds: dict[str, list[float]] = {}
        within_s = 20.0 + 20 * setup.moved_bytes / link_bytes_per_s
        with _Hivemind(setup, network, hosts, folder) as theirs:
            each = -(-rounds // max(1, len(setup.part_bytes)))
            for part_bytes in setup.part_bytes or (0,):
                theirs.open(part_bytes)
                for index in range(each + 1):
                    one = _round(ours, setup, within_s)
                    other_s = theirs.round_s(within_s)
                    plain = _mesh(ours, "plain", setup, within_s)
                    encrypted = _mesh(ours, "encrypted", setup, within_s)
                    text = f"ATOM {one['round_s']:.2f} s, hivemind {other_s or 0:.2f} s"
                    text += f", streams {encrypted['took_s']:.2f} s, plain {plain['took_s']:.2f} s"
                    progress(f"{where}, parts of {part_bytes >> 10} KiB: {text}")
                    if index:
                        measured["rounds"].append(one)
                        measured["plain"].append(plain)
                        measured["encrypted"].append(encrypted)
                        if other_s is not None:
                            their_rounds.setdefault(str(part_bytes), []).append(other_s)
            costs = _round(ours, setup, within_s, told_apart=True)["costs"]
            ours.tell_all("leave", _START_S)
            wrong = theirs.wrong_rounds
    return {
        **streams_result(setup.moved_bytes, rate, measured, their_rounds),
        "hivemind_wrong_rounds": wrong,
        "costs": costs,
    }


class WrongMeanError(PeerError):
    """A round ended without an error, but not with the mean of what the peers had."""


class _Hivemind:
    """Peers with hivemind's averager, if it is to be measured; a context that ends them."""

    def __init__(
        self, setup: AveragingSetup, network: Network | None, hosts: list[str], folder: Path
    ) -> None:
        self._setup = setup
        self._peers: Peers | None = None
        self._part_bytes = 0
        self.wrong_rounds = 0
        """Rounds that ended with a mean that was not the mean; they were made again."""
        if setup.part_bytes:
            self._peers = Peers("hivemind", network, setup.peers, folder, group=True)
            self._start(self._peers, hosts)

    def __enter__(self) -> _Hivemind:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._peers is not None:
            with self._peers:
                if kind is None:
                    self._peers.tell_all("leave", _START_S)

    def open(self, part_bytes: int) -> None:
        """Have new averagers that send parts of this size."""
        self._part_bytes = part_bytes
        if self._peers is not None:
            self._peers.tell_all(
                "average", _START_S, lambda rank: {"rank": rank},
                elements=self._setup.elements, peers=self._setup.peers, part_bytes=part_bytes,
            )  # fmt: skip

    def round_s(self, within_s: float) -> float | None:
        """Average once; return the seconds, or None if it is not to be measured.

        Now and then some members are left without the mean, and are told of no failure. Such a
        round has no time: new averagers make it again, after one round to warm up as all have.

        Raises:
            WrongMeanError: the mean was wrong `_TRIES` times in a row.
        """
        if self._peers is None:
            return None
        wrong = 0
        while True:
            try:
                if wrong:
                    self.open(self._part_bytes)
                    self._average(self._peers, within_s)
                return self._average(self._peers, within_s)
            except WrongMeanError as error:
                wrong += 1
                self.wrong_rounds += 1
                if wrong == _TRIES:
                    raise
                progress(f"{error}; made again")

    def _average(self, peers: Peers, within_s: float) -> float:
        peers.tell_all("assemble", within_s + 30, patience_s=within_s)
        return float(_round(peers, self._setup, within_s)["round_s"])

    def _start(self, peers: Peers, hosts: list[str]) -> None:
        try:
            peers.tell_all("hello", _START_S)
            first = peers.tell(0, "enter", _START_S, address=hosts[0], join=[])
            for index in range(1, self._setup.peers):
                join = first["addresses"]
                peers.tell(index, "enter", _START_S, address=hosts[index], join=join)
        except BaseException:
            peers.close()
            raise


def _probe(ours: Peers, setup: AveragingSetup, hosts: list[str]) -> float:
    port = ours.tell(0, "listen", _START_S, address=hosts[0])["port"]
    probe: dict[str, Any] = {"address": hosts[0], "port": port, "probe_bytes": setup.probe_bytes}
    return float(ours.tell(1, "probe", _START_S, **probe)["bits_per_s"])


def _open_mesh(ours: Peers, setup: AveragingSetup, hosts: list[str]) -> None:
    answers = ours.tell_all(
        "offer_mesh", _START_S, lambda rank: {"rank": rank, "address": hosts[rank]}
    )
    addresses = {
        kind: [(host, answer["ports"][kind]) for host, answer in zip(hosts, answers, strict=True)]
        for kind in answers[0]["ports"]
    }
    ours.tell_all("join_mesh", _START_S, addresses=addresses, elements=setup.elements)


def _mesh(ours: Peers, kind: str, setup: AveragingSetup, within_s: float) -> Result:
    return _together(ours, "mesh", within_s, kind=kind, moved_bytes=int(setup.moved_bytes))


def _together(ours: Peers, do: str, within_s: float, **how: Any) -> Result:
    """Have all peers do something at the same time; return when the last was done."""
    at_s = time.monotonic() + 0.5
    answers = ours.tell_all(do, within_s, at_s=at_s, **how)
    return {
        "took_s": max(answer["took_s"] for answer in answers),
        "processor_s": sum(answer["processor_s"] for answer in answers),
    }


def _enter(ours: Peers, setup: AveragingSetup, hosts: list[str], link_bytes_per_s: float) -> None:
    within_s = _START_S + 4 * setup.bytes * setup.peers / link_bytes_per_s
    join = None
    for index in range(setup.peers):
        answer = ours.tell(
            index, "enter", within_s, address=hosts[index], join=join, elements=setup.elements,
            rank=index, wire="float32", link_bytes_per_s=link_bytes_per_s,
        )  # fmt: skip
        join = join or answer["address"]
    ours.tell_all("meet", _START_S, peers=setup.peers, patience_s=_START_S)


def _round(peers: Peers, setup: AveragingSetup, within_s: float, **how: Any) -> Result:
    """Have all peers average once; return the slowest one's time, checked for the right mean.

    Processor times are those of all peers together.

    Raises:
        WrongMeanError: some peer has another mean than the right one.
    """
    answers = peers.tell_all(
        "round", within_s + 30, at_s=time.monotonic() + 0.5, peers=setup.peers,
        patience_s=within_s, **how,
    )  # fmt: skip
    checks = peers.tell_all("check", _START_S)
    errors = [float(check["error"]) for check in checks]
    right = all(error <= _ERROR_MAX for error in errors)  # false for NaN, too
    if not right or len({check.get("digest") for check in checks}) > 1:
        raise WrongMeanError(f"{peers.method}: a wrong mean, off by {errors}")
    slowest = max(answers, key=lambda answer: float(answer["round_s"]))
    costs: Counter[str] = Counter()
    for answer in answers:
        costs.update(answer.get("costs", {}))
    processor_s = sum(answer.get("processor_s", 0.0) for answer in answers)
    return {**slowest, "processor_s": processor_s, "costs": dict(costs)}
