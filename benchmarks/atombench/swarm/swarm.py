"""Benchmark `swarm`: how much averaging in the background slows training down.

Peers in namespaces of their own, joined by links of a given rate, train the same swapped model,
by turns alone and as a swarm (`local`, low-bit wire). All train at the same time in all windows, so
they share the machine's cores alike. Each window as a swarm is compared with the mean of the two
alone around it; the figure is the median, and its spread says what it is worth.

Then they train with each wire format, at the pace that a run takes by default: what encoding,
decoding and error feedback take of the processor, as a share of what a step alone takes of it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.links.peers import Peers
from atombench.links.shaping import Link, Network
from atombench.network.model import ModelSetup
from atomtrain.errors import ConfigError
from atomtrain.swarm.codecs.names import CODEC_NAMES
from atomtrain.swarm.membership.rules import MEASURED

_START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class SwarmSetup:
    """Inputs of the benchmark."""

    peers: int = 4
    link_bits_per_s: float = 1e8
    model: ModelSetup = field(default_factory=ModelSetup)
    micro_batch: int = 16
    device_memory_bytes: int = 64 << 20
    device_link_bytes_per_s: float = 1e9
    local_steps: int = 30
    wire: str = "int4"
    settle_s: float = 8.0
    """Training before each window."""
    window_s: float = 25.0
    turns: int = 5
    """Windows as a swarm; one more alone."""
    codecs: tuple[str, ...] = CODEC_NAMES
    """Wire formats whose processor time is measured."""
    codec_settle_s: float = 60.0
    """Training before each wire format's window: until two rounds have told the pace."""

    def __post_init__(self) -> None:
        if self.peers < 2 or self.window_s <= 0 or self.turns < 1:
            raise ConfigError(
                f"a swarm takes at least 2 peers, a window and a turn, not {self.peers}, "
                f"{self.window_s:g} s and {self.turns}"
            )


QUICK = SwarmSetup(
    peers=2,
    model=ModelSetup(layers=2, width=64, vocabulary=256, sequences_per_peer=16),
    micro_batch=8,
    local_steps=8,
    settle_s=2.0,
    window_s=4.0,
    turns=1,
    codecs=("int4",),
    codec_settle_s=2.0,
)


def run(options: BenchmarkOptions, setup: SwarmSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract.

    Raises:
        ConfigError: this machine or user cannot make network namespaces.
        PeerError: a peer failed.
    """
    setup = setup or (QUICK if options.quick else SwarmSetup())
    with (
        tempfile.TemporaryDirectory(prefix="atom-bench-swarm-") as folder,
        Network(setup.peers) as network,
        Peers("atom", network, setup.peers, Path(folder)) as peers,
    ):
        network.shape(Link(bits_per_s=setup.link_bits_per_s))
        peers.tell_all("hello", _START_S)
        peers.tell_all(
            "open", _START_S, lambda index: {"seed": index},
            model=setup.model.to_json(), micro_batch=setup.micro_batch,
            device_link_bytes_per_s=setup.device_link_bytes_per_s,
            device_memory_bytes=setup.device_memory_bytes,
        )  # fmt: skip
        alone = [_window(peers, setup, "alone")]
        together = []
        for turn in range(setup.turns):
            _enter(peers, setup, network, f"bench-{turn}")
            together.append(_window(peers, setup, "as a swarm"))
            peers.tell_all("leave", _START_S)
            alone.append(_window(peers, setup, "alone"))
        codecs = {wire: _codec_window(peers, setup, network, wire) for wire in setup.codecs}
    costs = codec_costs(alone, codecs)
    return {**_result(alone, together), **costs, "inputs": asdict(setup), **description()}


def _window(
    peers: Peers, setup: SwarmSetup, what: str, settle_s: float | None = None
) -> list[Result]:
    begin_s = time.monotonic() + 0.5
    start_s = begin_s + (setup.settle_s if settle_s is None else settle_s)
    until_s = start_s + setup.window_s
    replies = peers.tell_all(
        "train", until_s - begin_s + _START_S,
        begin_s=begin_s, start_s=start_s, until_s=until_s, least_steps=2,
    )  # fmt: skip
    progress(f"{what}: {_tokens_per_s(replies):.0f} tokens/s a peer")
    return replies


def _codec_window(peers: Peers, setup: SwarmSetup, network: Network, wire: str) -> list[Result]:
    """Train with a wire format at the pace that measurements give; return what peers tell."""
    paced = replace(setup, wire=wire, local_steps=MEASURED)
    _enter(peers, paced, network, f"bench-{wire}", count_codecs=True)
    replies = _window(peers, paced, wire, setup.codec_settle_s)
    peers.tell_all("leave", _START_S)
    return replies


def _enter(
    peers: Peers, setup: SwarmSetup, network: Network, run: str, *, count_codecs: bool = False
) -> None:
    join = None
    for index in range(setup.peers):
        reply = peers.tell(
            index, "enter", _START_S, run=run, peers=setup.peers,
            address=network.address(index), join=join, local_steps=setup.local_steps,
            link_bytes_per_s=setup.link_bits_per_s / 16, wire=setup.wire, count_codecs=count_codecs,
        )  # fmt: skip
        join = join or reply["address"]


def _tokens_per_s(replies: list[Result]) -> float:
    rates = [float(r["tokens"]) / (r["ended_s"] - r["started_s"]) for r in replies]
    return float(statistics.mean(rates))


def _result(alone: list[list[Result]], together: list[list[Result]]) -> Result:
    alone_rates = [_tokens_per_s(window) for window in alone]
    swarm_rates = [_tokens_per_s(window) for window in together]
    slowdowns = [
        1 - rate / statistics.mean(around)
        for rate, around in zip(swarm_rates, pairwise(alone_rates), strict=True)
    ]
    replies = [reply for window in together for reply in window]
    rounds = sum(reply["averaged"] for reply in replies)
    outcomes: dict[str, Any] = {}
    for reply in replies:
        for outcome, count in reply["rounds"].items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    sent_bytes = sum(reply["sent_bytes"] for reply in replies)
    times_s = [round_s for reply in replies for round_s in reply["round_s"]]
    return {
        "alone_tokens_per_s": statistics.median(alone_rates),
        "peer_tokens_per_s": statistics.median(swarm_rates),
        "slowdown_share": statistics.median(slowdowns),
        "slowdown_shares": slowdowns,
        "wire_bytes_per_round": sent_bytes / rounds if rounds else None,
        "alone_windows_tokens_per_s": alone_rates,
        "rounds_per_peer": rounds / len(together[0]),
        "round_s": statistics.median(times_s) if times_s else None,
        "outcomes": outcomes,
    }


def codec_costs(alone: list[list[Result]], codecs: dict[str, list[Result]]) -> Result:
    """Return what each wire format takes of a step's processor time, of what the peers told.

    A step is one of those alone: what the formats take is not part of it.
    """
    step_s = statistics.mean(reply["processor_s"] for window in alone for reply in window)
    found = {}
    for wire, replies in codecs.items():
        codec_s = sum(reply["codec_s"] for reply in replies)
        rounds = sum(reply["averaged"] for reply in replies)
        steps = sum(reply["steps"] for reply in replies)
        paces = [reply["steps_per_round"] for reply in replies]
        found[wire] = {
            "processor_share": codec_s / steps / step_s if rounds else None,
            "processor_s_per_round": codec_s / rounds if rounds else None,
            "rounds_per_peer": rounds / len(replies),
            "steps_per_round": statistics.median(paces),
        }
    return {"step_processor_s": step_s, "codecs": found}
