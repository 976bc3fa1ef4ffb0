"""Benchmark `relay`: how fast state comes through a relay, against straight from the donor.

Four peers in network namespaces, each with a link of a given rate. Two can be dialled; two are
behind routers that translate addresses, so that streams between those go through one of the others.
One of the two behind a NAT fetches the same state in turns from a peer that it can dial and from
the one that it cannot. All streams are encrypted from end to end, and in turns belong to nothing
else: rounds do not run meanwhile.

- `direct_bytes_per_s`, `relayed_bytes_per_s`: medians, from opening the stream to the checked hash.
- `relayed_share`: the second by the first.
- `direct_open_s`, `relayed_open_s`: opening a stream until a message was answered on it.
- `tcp_bytes_per_s`: what one plain TCP stream moves over one such link.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.benchmarks.network_peers import PeerError, Peers
from atomtrain.benchmarks.shaping import Link, Network
from atomtrain.errors import ConfigError

_PORT = 4100
_WITHIN_S = 120.0
_SETTLE_S = 60.0
_TCP_BYTES = 25_000_000
RELAY, HIDDEN, ASKING, DIALLED = range(4)
"""Hosts: who relays (the other one that can be dialled may, too), and the three that fetch."""


@dataclass(frozen=True, kw_only=True)
class RelaySetup:
    """Inputs of the benchmark."""

    state_bytes: int = 50_000_000
    """Float32 parameters that are fetched each time."""
    link_bits_per_s: float = 1e8
    """Rate of each peer's link, each way."""
    round_trip_s: float = 0.0
    """Added between any two hosts; through a relay it counts twice."""
    repeats: int = 3
    """Fetches of each kind."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.state_bytes < 4:
            raise ConfigError(f"bench relay cannot be done with {self}; use at least 1 of each")


QUICK = RelaySetup(state_bytes=10_000_000, repeats=1)


def run(options: BenchmarkOptions, setup: RelaySetup | None = None) -> Result:
    """Measure, and return the keys above with the inputs.

    Raises:
        ConfigError: no network with address translation can be built here.
        PeerError: a peer failed, or nothing went through a relay.
    """
    setup = setup or (QUICK if options.quick else RelaySetup())
    with (
        tempfile.TemporaryDirectory(prefix="atom-relay-", dir="/tmp") as folder,
        Network(4) as network,
    ):
        for host in (HIDDEN, ASKING):
            network.put_behind_nat(host)
        network.shape(Link(bits_per_s=setup.link_bits_per_s, round_trip_s=setup.round_trip_s))
        with Peers("relay", network, 4, Path(folder)) as peers:
            tcp = _tcp(network, peers)
            ids = _gather(network, peers, setup)
            measured = _fetch_in_turns(peers, setup, ids)
            passed = sum(
                int(peers.tell(host, "passed", _WITHIN_S)["passed_bytes"])
                for host in (RELAY, DIALLED)
            )
            peers.tell_all("leave", _WITHIN_S)
    if passed < setup.repeats * setup.state_bytes:
        raise PeerError(f"relay: only {passed} bytes went through a relay")
    return {
        "link_bits_per_s": setup.link_bits_per_s,
        "tcp_bytes_per_s": tcp,
        **measured,
        "passed_bytes": passed,
        "inputs": asdict(setup),
        **description(),
    }


def _tcp(network: Network, peers: Peers) -> float:
    roles = {DIALLED: "receive", ASKING: "send"}
    replies = peers.tell_all(
        "tcp", _WITHIN_S,
        lambda host: {
            "role": roles.get(host, "rest"), "host": network.address(DIALLED), "port": _PORT,
            "bytes_count": _TCP_BYTES,
        },
    )  # fmt: skip
    rate = float(replies[DIALLED]["bytes_per_s"])
    progress(f"plain TCP: {rate / 1e6:.1f} MB/s")
    return rate


def _gather(network: Network, peers: Peers, setup: RelaySetup) -> list[str]:
    """Have all be members, and those behind a NAT have their relays; return all ids."""
    peers.tell_all("warm", _WITHIN_S)
    address = peers.tell(
        RELAY, "found", _WITHIN_S, host=network.address(RELAY), elements=[setup.state_bytes // 4],
        step_s=0.5, steps_per_round=100_000,
    )["address"]  # fmt: skip
    for host in (HIDDEN, DIALLED, ASKING):
        within_s = _WITHIN_S + 40 * setup.state_bytes / setup.link_bits_per_s
        joining = {"host": network.address(host), "address": address, "step_s": 0.5}
        peers.tell(host, "join", within_s, **joining)
    ids = [str(peers.tell(host, "members", _WITHIN_S)["peer_id"]) for host in range(4)]
    until_s = time.monotonic() + _SETTLE_S
    relays: dict[str, int] = {}
    while not all(relays.get(ids[host]) for host in (HIDDEN, ASKING)):
        if time.monotonic() > until_s:
            raise PeerError(f"relay: nobody relays after {_SETTLE_S:.0f} s: {relays}")
        time.sleep(0.5)
        relays = peers.tell(ASKING, "members", _WITHIN_S)["relays"]
    return ids


def _fetch_in_turns(peers: Peers, setup: RelaySetup, ids: list[str]) -> Result:
    rates: dict[str, list[float]] = {}
    opened: dict[str, list[float]] = {}
    within_s = _WITHIN_S + 80 * setup.state_bytes / setup.link_bits_per_s
    for _ in range(setup.repeats):
        for kind, donor in (("direct", DIALLED), ("relayed", HIDDEN)):
            way = peers.tell(ASKING, "open", _WITHIN_S, peer_id=ids[donor])
            if (way["through"] is None) != (kind == "direct"):
                raise PeerError(f"relay: the {kind} stream led through {way['through']}")
            told = peers.tell(ASKING, "fetch", within_s, peer_id=ids[donor])
            rates.setdefault(kind, []).append(told["bytes"] / told["seconds"])
            opened.setdefault(kind, []).append(float(way["open_s"]))
            progress(f"{kind}: {rates[kind][-1] / 1e6:.2f} MB/s")
    direct, relayed = (statistics.median(rates[kind]) for kind in ("direct", "relayed"))
    return {
        "direct_bytes_per_s": direct,
        "relayed_bytes_per_s": relayed,
        "relayed_share": relayed / direct,
        "direct_open_s": statistics.median(opened["direct"]),
        "relayed_open_s": statistics.median(opened["relayed"]),
        "all_direct_bytes_per_s": rates["direct"],
        "all_relayed_bytes_per_s": rates["relayed"],
    }
