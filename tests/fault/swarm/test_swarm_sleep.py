"""A laptop whose lid is closed, and clocks that somebody sets, with real processes.

What sleeps is the peer's process and its daemon, for a minute: longer than all its streams and its
connections live. Meanwhile the clocks of all machines go on by an hour at once, so that every
record there was has expired, the others' own too. On a virtual clock the hour passes in full:
`tests/unit/swarm/node/test_asleep.py`.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors

pytestmark = pytest.mark.matrix
HOUR_S = 3600.0
ASLEEP_S = 60.0
"""libp2p gives a connection up after 40 s without an answer."""


class Clocks:
    """By how much the clocks of all processes that read this file are ahead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(struct.pack("dd", 0.0, 0.0))

    def jump(self, day_s: float, steady_s: float) -> None:
        """Move the time of day, and the clock that nobody sets."""
        with self.path.open("r+b") as opened:
            opened.write(struct.pack("dd", day_s, steady_s))


def start_three(peers: list[PeerProcess], clocks: Clocks) -> list[PeerProcess]:
    settings = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "clocks": str(clocks.path)}
    peers.append(PeerProcess(**settings))
    address = peers[0].wait_ready()
    peers += [PeerProcess(**settings, join=[address]) for _ in range(2)]
    for peer in peers[1:]:
        peer.wait_ready()
    wait_averaged(peers[1], *peers)
    return peers


@pytest.mark.parametrize("sleeper", [0, 2], ids=["founder", "newcomer"])
def test_a_lid_closed_for_an_hour(peers: list[PeerProcess], tmp_path: Path, sleeper: int) -> None:
    clocks = Clocks(tmp_path / "clocks")
    asleep = start_three(peers, clocks)[sleeper]
    awake = [peer for peer in peers if peer is not asleep]
    asleep.signal(signal.SIGSTOP)
    os.kill(asleep.daemon, signal.SIGSTOP)
    try:
        clocks.jump(HOUR_S, HOUR_S)
        time.sleep(ASLEEP_S)
        wait_averaged(awake[0], *awake)
    finally:
        os.kill(asleep.daemon, signal.SIGCONT)
    before = asleep.lines("state")[-1]["versions"]
    (there, *_) = awake[0].lines("state", awake[0].now - 1) or awake[0].lines("state")[-1:]
    assert min(there["versions"]) > max(before) + 10, "the others have gone on"

    asleep.signal(signal.SIGCONT)
    wait_averaged(awake[0], *peers)
    wait_same_anchors(*peers)


def test_the_time_of_day_is_set_an_hour_ahead_on_all_machines(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    """No record expires of it, and newcomers are let in."""
    clocks = Clocks(tmp_path / "clocks")
    first, *_ = start_three(peers, clocks)
    clocks.jump(HOUR_S, 0.0)
    time.sleep(8.0)  # longer than records live
    wait_averaged(peers[1], *peers)
    reports = first.lines("round")[-5:]
    assert all(len(report["contributors"]) == 3 for report in reports), reports
    late = PeerProcess(target=1.0, join=[first.wait_ready()], expiry_s=4.0, round_floor_s=2.0)
    peers.append(late)
    late.wait_ready()
    wait_averaged(first, *peers)
