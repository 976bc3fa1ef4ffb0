"""Peers behind routers that translate addresses, in namespaces: relays between them are killed.

Needs root, `nft`, and a kernel that translates addresses; skipped for others, and in CI.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import pytest

from atombench.links.shaping import Link, Network
from tests.support.namespaces import namespaces
from tests.support.swarm_processes import PeerProcess, in_network, wait_averaged

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("CI")), reason="needs root"),
]
SETTINGS = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "elements": [100_000, 200_001]}
PUBLIC, HIDDEN = (0, 3), (1, 2)


@pytest.fixture
def network() -> Iterator[Network]:
    with namespaces(4, HIDDEN, Link(bits_per_s=5e7)) as network:
        yield network


def start(network: Network, peers: list[PeerProcess], host: int, join: Sequence[str]) -> None:
    peers.append(in_network(network, host, join, **SETTINGS))


def wait_relays(seen_by: PeerProcess, of: PeerProcess, count: int) -> None:
    seen_by.wait_for("state", lambda said: said["relays"].get(of.peer_id) == count)


def test_peers_behind_nats_average_through_relays_of_which_one_is_killed(
    network: Network, peers: list[PeerProcess]
) -> None:
    start(network, peers, PUBLIC[0], ())
    address = peers[0].wait_ready()
    for host in (*HIDDEN, PUBLIC[1]):
        start(network, peers, host, [address])
    for peer in peers[1:]:
        peer.wait_ready()
    first, one, other, second = peers
    wait_averaged(one, *peers)
    wait_averaged(other, *peers)
    for hidden in (one, other):
        wait_relays(second, hidden, 2)
    wait_averaged(first, *peers)
    time.sleep(0.2)  # rounds follow each other closely: the next is under way
    first.kill()
    wait_averaged(one, one, other, second)
    wait_averaged(other, one, other, second)
    for hidden in (one, other):
        last = second.now
        second.wait_for(
            "state", lambda said, peer=hidden: said["relays"].get(peer.peer_id) == 1, last
        )
