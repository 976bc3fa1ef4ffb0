"""Benchmark `relay`: how fast state comes through a relay, against straight from the donor.

Six peers in network namespaces, each with a link of a given rate. Two can be dialled; four are
behind routers that translate addresses, so that streams between those go through one of the others.
One of the four fetches the same state in turns from a peer that it can dial and from one that it
cannot. All streams are encrypted from end to end, and belong to nothing else: rounds do not run
meanwhile.

- `direct_bytes_per_s`, `relayed_bytes_per_s`: medians, from opening the stream to the checked hash.
- `relayed_share`: the second by the first.
- `direct_open_s`, `relayed_open_s`: opening a stream until a message was answered on it.
- `tcp_bytes_per_s`: what one plain TCP stream moves over one such link.
- `far`: the same keys, and the inputs, over links with a round trip that lose packets.
- `two_pairs`: two peers fetch at once, from donors that both can dial, then from donors that they
  cannot: rates of each, and how many relays the two relayed streams took between them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.links.peers import PeerError, Peers
from atombench.links.shaping import Link, Network
from atomtrain.errors import ConfigError

_PORT = 4100
_WITHIN_S = 120.0
_SETTLE_S = 60.0
_FETCH_S = 400.0
_TCP_BYTES, _FAR_TCP_BYTES = 25_000_000, 10_000_000
_HOSTS = 6
RELAY, HIDDEN, ASKING, DIALLED, HIDDEN_TOO, ASKING_TOO = range(6)
"""Hosts: two that can be dialled, of which any may relay, and two pairs that cannot."""


@dataclass(frozen=True, kw_only=True)
class RelaySetup:
    """Inputs of the benchmark."""

    state_bytes: int = 50_000_000
    """Float32 parameters that are fetched each time."""
    link_bits_per_s: float = 1e8
    """Rate of each peer's link, each way."""
    far_state_bytes: int = 10_000_000
    """Float32 parameters that are fetched each time over links that are `far`."""
    far_round_trip_s: float = 0.05
    """Added there between any two hosts; through a relay it counts twice."""
    far_loss_share: float = 0.001
    """So many packets get lost there; through a relay on both halves of the way."""
    repeats: int = 3
    """Fetches of each kind."""

    def __post_init__(self) -> None:
        if self.repeats < 1 or min(self.state_bytes, self.far_state_bytes) < 4:
            raise ConfigError(f"bench relay cannot be done with {self}; use at least 1 of each")

    @property
    def near(self) -> Link:
        """A link without delay."""
        return Link(bits_per_s=self.link_bits_per_s)

    @property
    def far(self) -> Link:
        """A link with delay and loss."""
        return Link(
            bits_per_s=self.link_bits_per_s,
            round_trip_s=self.far_round_trip_s,
            loss_share=self.far_loss_share,
        )

    @property
    def elements(self) -> list[int]:
        """Elements of the run's two fragments: the near state and the far one."""
        return [self.state_bytes // 4, self.far_state_bytes // 4]


QUICK = RelaySetup(state_bytes=10_000_000, far_state_bytes=2_000_000, repeats=1)


def run(options: BenchmarkOptions, setup: RelaySetup | None = None) -> Result:
    """Measure, and return the keys above with the inputs.

    Raises:
        ConfigError: no network with address translation can be built here.
        PeerError: a peer failed, or nothing went through a relay.
    """
    setup = setup or (QUICK if options.quick else RelaySetup())
    with (
        tempfile.TemporaryDirectory(prefix="atom-relay-", dir="/tmp") as folder,
        Network(_HOSTS) as network,
    ):
        for host in (HIDDEN, ASKING, HIDDEN_TOO, ASKING_TOO):
            network.put_behind_nat(host)
        network.shape(setup.near)
        with Peers("relay", network, _HOSTS, Path(folder)) as peers:
            near = {"tcp_bytes_per_s": _tcp(network, peers, _TCP_BYTES)}
            ids = _gather(network, peers, setup)
            near |= _fetch_in_turns(peers, setup, ids, 0)
            pairs = _two_pairs(peers, setup, ids)
            network.shape(setup.far)
            far = {"tcp_bytes_per_s": _tcp(network, peers, _FAR_TCP_BYTES)}
            far |= _fetch_in_turns(peers, setup, ids, 1)
            passed = sum(
                int(peers.tell(host, "passed", _WITHIN_S)["passed_bytes"])
                for host in (RELAY, DIALLED)
            )
            peers.tell_all("leave", _WITHIN_S)
    wanted = setup.repeats * (3 * setup.state_bytes + setup.far_state_bytes)
    if passed < wanted:
        raise PeerError(f"relay: only {passed} bytes of {wanted} went through a relay")
    return {
        "link_bits_per_s": setup.link_bits_per_s,
        **near,
        "far": far,
        "two_pairs": pairs,
        "passed_bytes": passed,
        "inputs": asdict(setup),
        **description(),
    }


def _tcp(network: Network, peers: Peers, bytes_count: int) -> float:
    roles = {DIALLED: "receive", ASKING: "send"}
    replies = peers.tell_all(
        "tcp", _WITHIN_S,
        lambda host: {
            "role": roles.get(host, "rest"), "host": network.address(DIALLED), "port": _PORT,
            "bytes_count": bytes_count,
        },
    )  # fmt: skip
    rate = float(replies[DIALLED]["bytes_per_s"])
    progress(f"plain TCP: {rate / 1e6:.2f} MB/s")
    return rate


def _gather(network: Network, peers: Peers, setup: RelaySetup) -> list[str]:
    """Have all be members, and those behind a NAT have their relays; return all ids."""
    peers.tell_all("warm", _WITHIN_S)
    address = peers.tell(
        RELAY, "found", _WITHIN_S, host=network.address(RELAY), elements=setup.elements,
        step_s=0.5, steps_per_round=100_000,
    )["address"]  # fmt: skip
    for host in (HIDDEN, DIALLED, ASKING, HIDDEN_TOO, ASKING_TOO):
        within_s = _WITHIN_S + 160 * sum(setup.elements) / setup.link_bits_per_s
        joining = {"host": network.address(host), "address": address, "step_s": 0.5}
        peers.tell(host, "join", within_s, **joining)
    ids = [str(peers.tell(host, "members", _WITHIN_S)["peer_id"]) for host in range(_HOSTS)]
    until_s = time.monotonic() + _SETTLE_S
    relays: dict[str, int] = {}
    while not all(relays.get(ids[host]) for host in (HIDDEN, ASKING, HIDDEN_TOO, ASKING_TOO)):
        if time.monotonic() > until_s:
            raise PeerError(f"relay: nobody relays after {_SETTLE_S:.0f} s: {relays}")
        time.sleep(0.5)
        relays = peers.tell(ASKING, "members", _WITHIN_S)["relays"]
    return ids


def _fetch_in_turns(peers: Peers, setup: RelaySetup, ids: list[str], fragment: int) -> Result:
    rates: dict[str, list[float]] = {}
    opened: dict[str, list[float]] = {}
    for _ in range(setup.repeats):
        for kind, donor in (("direct", DIALLED), ("relayed", HIDDEN)):
            way = _way(peers, ASKING, ids[donor], kind)
            told = peers.tell(ASKING, "fetch", _FETCH_S, peer_id=ids[donor], fragment=fragment)
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


def _two_pairs(peers: Peers, setup: RelaySetup, ids: list[str]) -> Result:
    """Have two peers fetch at once; return the medians of each of the two."""
    rates: dict[str, list[list[float]]] = {"direct": [], "relayed": []}
    relays = set()
    for _ in range(setup.repeats):
        for kind, donors in (
            ("direct", {ASKING: DIALLED, ASKING_TOO: RELAY}),
            ("relayed", {ASKING: HIDDEN, ASKING_TOO: HIDDEN_TOO}),
        ):
            found = {_way(peers, asking, ids[d], kind)["through"] for asking, d in donors.items()}
            relays |= found - {None}
            whom: list[Result] = [{"peer_id": None}] * _HOSTS
            for host, donor in donors.items():
                whom[host] = {"peer_id": ids[donor]}
            told = peers.tell_all("fetch", _FETCH_S, whom.__getitem__)
            rates[kind].append([told[host]["bytes"] / told[host]["seconds"] for host in donors])
            both = " and ".join(f"{rate / 1e6:.2f}" for rate in rates[kind][-1])
            progress(f"two at once, {kind}: {both} MB/s")
    medians = {
        f"{kind}_bytes_per_s": [statistics.median(one) for one in zip(*taken, strict=True)]
        for kind, taken in rates.items()
    }
    return {**medians, "relays": len(relays)}


def _way(peers: Peers, asking: int, donor_id: str, kind: str) -> Result:
    """Open a stream; return how long it took and through whom, which must be as `kind` says."""
    way = peers.tell(asking, "open", _WITHIN_S, peer_id=donor_id)
    if (way["through"] is None) != (kind == "direct"):
        raise PeerError(f"relay: the {kind} stream led through {way['through']}")
    return way
