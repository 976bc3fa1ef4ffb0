"""Peers in network namespaces: one that nobody can dial; a network that is cut and made whole.

Run with the fault matrix, as root: `pytest -m matrix tests/fault`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from atombench.links.shaping import Link, Network
from tests.support.namespaces import namespaces
from tests.support.swarm_processes import PeerProcess, in_network, wait_averaged

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("CI")), reason="needs root"),
]
SETTINGS = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0}


@pytest.fixture
def network() -> Iterator[Network]:
    with namespaces(3) as network:
        yield network


def switch(network: Network, *command: str) -> None:
    """Run a command where the ports of the switch are."""
    subprocess.run([*network._switch(), *command], check=True, capture_output=True, timeout=20)


def start(network: Network, peers: list[PeerProcess], host: int, join: Sequence[str]) -> str:
    peers.append(in_network(network, host, join, **SETTINGS))
    return peers[-1].wait_ready()


def let_nobody_dial(network: Network, host: int) -> None:
    """Drop what opens connections towards a host, as a router with address translation does."""
    port = f"p{host}"
    root, never = ("parent", "1:"), "1:20"
    switch(network, "tc", "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default",
           "10")  # fmt: skip
    for name, rate in (("1:10", "10gbit"), (never, "8bit")):
        switch(network, "tc", "class", "add", "dev", port, *root, "classid", name, "htb", "rate",
               rate)  # fmt: skip
    switch(network, "tc", "qdisc", "add", "dev", port, "parent", never, "pfifo", "limit", "0")
    opening = ("match", "u8", "0x02", "0x12", "at", "33")  # SYN without ACK
    switch(network, "tc", "filter", "add", "dev", port, *root, "protocol", "ip", "prio", "1",
           "u32", "match", "ip", "protocol", "6", "0xff", *opening, "flowid", never)  # fmt: skip


def test_a_peer_that_nobody_can_dial_takes_part(network: Network, peers: list[PeerProcess]) -> None:
    let_nobody_dial(network, 2)
    address = start(network, peers, 0, ())
    start(network, peers, 1, (address,))
    start(network, peers, 2, (address,))
    wait_averaged(peers[1], *peers)
    wait_averaged(peers[2], *peers)


def test_a_cut_network_goes_on_in_halves_and_grows_together(
    network: Network, peers: list[PeerProcess]
) -> None:
    address = start(network, peers, 0, ())
    start(network, peers, 1, (address,))
    start(network, peers, 2, (address,))
    first, second, third = peers
    wait_averaged(first, *peers)
    switch(network, "ip", "link", "set", "p2", "nomaster")
    wait_averaged(first, first, second)
    alone = third.wait_for("round", lambda said: said["reason"] == "alone", third.now)
    assert alone["contributors"] == [third.peer_id]
    switch(network, "ip", "link", "set", "p2", "master", "br0")
    wait_averaged(first, *peers)
    wait_averaged(third, *peers)


def test_a_network_that_loses_packets_is_one_to_average_over(
    network: Network, peers: list[PeerProcess]
) -> None:
    network.shape(Link(bits_per_s=2e7, round_trip_s=0.03, loss_share=0.03))
    address = start(network, peers, 0, ())
    start(network, peers, 1, (address,))
    start(network, peers, 2, (address,))
    wait_averaged(peers[0], *peers)
    wait_averaged(peers[1], *peers)
