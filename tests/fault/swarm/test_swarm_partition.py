"""Eight peers whose network is cut into halves for a while, with one that lies in each half.

Run with the fault matrix, as root: `pytest -m matrix tests/fault`. The cut lasts `PARTITION_S`
seconds, by default 20; what was measured with two minutes is in benchmarks/README.md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from atombench.links.shaping import Network
from tests.support.namespaces import namespaces
from tests.support.swarm_problem import ELEMENTS
from tests.support.swarm_processes import PeerProcess, in_network

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0 or bool(os.environ.get("CI")), reason="needs root"),
]
CUT_S = float(os.environ.get("PARTITION_S", "20"))
HONEST = 6
FIRST_HALF, SECOND_HALF = (0, 1, 2, 6), (3, 4, 5, 7)
LIES = {6: "false mean times -5", 7: "contribute -9 times"}
"""By host."""
SETTINGS = {
    "elements": [ELEMENTS], "expiry_s": 4.0, "round_floor_s": 2.0, "step_s": 0.1, "group_size": 0,
}  # fmt: skip
_ROUNDS = 30
"""After the halves have met, in which what each has learnt alone comes together."""


def _plug(network: Network, bridge: str) -> None:
    """Plug the second half's hosts into this bridge of the switch."""
    for host in SECOND_HALF:
        if host < network.hosts:
            _switch(network, "ip", "link", "set", f"p{host}", "master", bridge)


def _switch(network: Network, *command: str) -> None:
    subprocess.run([*network._switch(), *command], check=True, capture_output=True, timeout=60)


def _wait_with(peer: PeerProcess, members: list[PeerProcess], without: list[PeerProcess]) -> None:
    """Wait until a peer tells of a new round with all of these members, and none of the others."""
    wanted, unwanted = ({one.peer_id for one in some} for some in (members, without))
    peer.wait_for(
        "round",
        lambda said: (
            wanted <= set(said["contributors"]) and not unwanted & set(said["contributors"])
        ),
        peer.now,
    )


def _learnt(peers: list[PeerProcess], lies_file: Path, *, lying: bool) -> float:
    """Return the honest peers' loss on held-out samples after the cut."""
    with namespaces(8 if lying else HONEST) as network:
        _switch(network, "ip", "link", "add", "br1", "type", "bridge")
        _switch(network, "ip", "link", "set", "br1", "up")
        started: dict[int, PeerProcess] = {}
        address: list[str] = []
        for host in range(network.hosts):
            told = {"fault": LIES[host], "fault_file": str(lies_file)} if host in LIES else {}
            peer = in_network(network, host, address, learns=host, **SETTINGS, **told)
            started[host] = peer
            peers.append(peer)
            address = address or [peer.wait_ready()]
        for peer in started.values():
            peer.wait_ready()
        honest = [started[host] for host in range(HONEST)]
        halves = [[p for p in honest if p in (started[h] for h in half if h in started)]
                  for half in (FIRST_HALF, SECOND_HALF)]  # fmt: skip
        for peer in honest:
            _wait_with(peer, honest, [])
        lies_file.touch()
        for host in LIES.keys() & started.keys():
            started[host].wait_for("fault")
        _plug(network, "br1")
        for half, other in (halves, halves[::-1]):
            for peer in half:
                _wait_with(peer, half, other)
        time.sleep(CUT_S)
        _plug(network, "br0")
        for peer in honest:
            _wait_with(peer, honest, [])
        for _ in range(_ROUNDS):
            _wait_with(honest[0], honest, [])
        losses = [said["loss"] for peer in honest for said in peer.lines("state")[-10:]]
        for peer in started.values():
            peer.end()
        for peer in started.values():
            peers.remove(peer)
            written = peer.finish()
            assert "Traceback" not in written
        return statistics.median(losses)


def test_halves_with_a_liar_in_each_meet_and_learn_as_without(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    alone = _learnt(peers, tmp_path / "nobody", lying=False)
    with_liars = _learnt(peers, tmp_path / "begin", lying=True)
    print(f"held-out loss: {alone:.5f} without liars, {with_liars:.5f} with them, "
          f"{with_liars / alone:.4f} times")  # fmt: skip
    assert with_liars <= 1.03 * alone
