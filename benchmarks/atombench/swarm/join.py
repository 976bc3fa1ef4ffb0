"""How long a newcomer takes to fetch the state over a link, and what the others notice of it.

Peers in network namespaces of their own, each with a link of a given rate. Three train (their steps
are waits, see `peers`); when rounds are under way, a fourth joins.

- `floor_s`: the time that one plain TCP stream takes for as many bytes over the same link, measured
  in the same run before the peers start.
- `join_s`: the way in, from starting the network daemon to membership.
- `download_s`: from there to holding all anchors, checked against their hashes.
- `download_ratio` is `download_s / floor_s`; `ratio` is `(join_s + download_s) / floor_s`.
- `slowdown_share`: by how much the others' mean step is longer while the newcomer downloads than in
  as long a time before. Peers share one machine's processor, so this is an upper bound.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.links.peers import Peers
from atombench.links.shaping import Link, Network
from atomtrain.errors import ConfigError

_PORT = 4100
_WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class JoinSetup:
    """Inputs of the benchmark."""

    members: int = 3
    """Peers that train before the newcomer comes; at least 1."""
    fragments: int = 8
    """Equal parts of the state; at least 1."""
    state_bytes: int = 500_000_000
    """Float32 parameters that the newcomer fetches."""
    link_bits_per_s: float = 1e9
    """Rate of each peer's link, each way."""
    step_s: float = 0.1
    """Time of a local step."""
    steps_per_round: int = 160
    """Local steps in which every fragment is averaged once."""
    calm_s: float = 15.0
    """How long the members train before they are compared."""

    def __post_init__(self) -> None:
        if self.members < 1 or self.fragments < 1 or self.state_bytes < 4 * self.fragments:
            raise ConfigError(f"bench join cannot be done with {self}; use at least 1 of each")


QUICK = JoinSetup(members=2, fragments=4, state_bytes=40_000_000, calm_s=4.0)


def run(options: BenchmarkOptions, setup: JoinSetup | None = None) -> Result:
    """Measure, and return the keys above with the inputs.

    Raises:
        ConfigError: no network can be built here.
        PeerError: a peer failed.
    """
    setup = setup or (QUICK if options.quick else JoinSetup())
    elements = [setup.state_bytes // 4 // setup.fragments] * setup.fragments
    hosts = setup.members + 1
    with (
        tempfile.TemporaryDirectory(prefix="atom-join-", dir="/tmp") as folder,
        Network(hosts) as network,
        Peers("join", network, hosts, Path(folder)) as peers,
    ):
        network.shape(Link(bits_per_s=setup.link_bits_per_s))
        floor_s = _floor_s(network, peers, setup, 4 * sum(elements))
        progress(f"plain TCP moves the state in {floor_s:.2f} s")
        members = _gather(network, peers, setup, elements)
        before, rounds_before = _steps(peers, members)
        joined_at_s = time.monotonic()
        told = peers.tell(
            hosts - 1, "join", 600.0, host=network.address(hosts - 1),
            address=peers.tell(0, "join_address", _WITHIN_S)["address"], step_s=setup.step_s,
        )  # fmt: skip
        during, rounds_during = _steps(peers, members)
        taken_s = time.monotonic() - joined_at_s
        peers.tell_all("leave", _WITHIN_S)
    slowdown = statistics.fmean(during) / statistics.fmean(before) - 1
    return {
        "state_bytes": 4 * sum(elements),
        "link_bits_per_s": setup.link_bits_per_s,
        "floor_s": floor_s,
        "download_s": told["download_s"],
        "download_ratio": told["download_s"] / floor_s,
        "ratio": (told["join_s"] + told["download_s"]) / floor_s,
        "join_s": told["join_s"],
        "member_step_before_s": statistics.fmean(before),
        "member_step_during_s": statistics.fmean(during),
        "slowdown_share": slowdown,
        "rounds_before": rounds_before,
        "rounds_during": rounds_during,
        "observed_s": taken_s,
        "inputs": asdict(setup),
        **description(),
    }


def _floor_s(network: Network, peers: Peers, setup: JoinSetup, state_bytes: int) -> float:
    """Send plain bytes from the first host to the newcomer's."""
    last = setup.members
    size = min(state_bytes, 250_000_000)
    host = network.address(last)
    replies = peers.tell_all(
        "tcp", _WITHIN_S,
        lambda index: {
            "role": {0: "send", last: "receive"}.get(index, "rest"),
            "host": host, "port": _PORT, "bytes_count": size,
        },
    )  # fmt: skip
    return state_bytes / float(replies[last]["bytes_per_s"])


def _gather(network: Network, peers: Peers, setup: JoinSetup, elements: list[int]) -> list[int]:
    """Have the members train together for a while; return their numbers."""
    peers.tell_all("warm", _WITHIN_S, elements=elements)
    address = peers.tell(
        0, "found", _WITHIN_S, host=network.address(0), elements=elements, step_s=setup.step_s,
        steps_per_round=setup.steps_per_round,
    )["address"]  # fmt: skip
    for member in range(1, setup.members):
        peers.tell(
            member, "join", 300.0, host=network.address(member), address=address,
            step_s=setup.step_s,
        )  # fmt: skip
    members = list(range(setup.members))
    progress(f"{setup.members} peers train")
    time.sleep(setup.calm_s / 2)
    _steps(peers, members)
    time.sleep(setup.calm_s)
    return members


def _steps(peers: Peers, members: list[int]) -> tuple[list[float], int]:
    """Return the times of all members' steps since the last call, and their rounds."""
    replies = [peers.tell(member, "steps", _WITHIN_S) for member in members]
    steps = [step for reply in replies for step in reply["steps_s"]]
    return steps, max(len(reply["outcomes"]) for reply in replies)
