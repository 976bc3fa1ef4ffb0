"""Peers in processes of their own are killed and stopped; the others must go on."""

from __future__ import annotations

import signal
import time

from tests.support.swarm_processes import (
    PeerProcess,
    wait_averaged,
    wait_same_anchors,
    wait_until_gone,
)


def test_whoever_is_killed_the_others_go_on(peers: list[PeerProcess]) -> None:
    first = PeerProcess(target=1.0)
    peers.append(first)
    address = first.wait_ready()
    second, third = (PeerProcess(target=t, join=[address]) for t in (-1.0, 0.0))
    peers += [second, third]
    survivor_address = second.wait_ready()
    third.wait_ready()
    wait_averaged(second, first, second, third)
    wait_same_anchors(first, second, third)

    first.kill()  # the peer through which all others came
    wait_until_gone(first.daemon)
    wait_averaged(second, second, third)

    newcomer = PeerProcess(target=0.5, join=[address, survivor_address])
    peers.append(newcomer)
    newcomer.wait_ready()
    wait_averaged(third, second, third, newcomer)
    wait_same_anchors(second, third, newcomer)

    third.kill()
    wait_averaged(second, second, newcomer)
    wait_same_anchors(second, newcomer)
    # Targets -1 and 0.5: the average lies between them, apart from local progress.
    second.wait_for("state", lambda said: -0.9 < said["means"][0] < 0.5, second.now)

    second.kill()
    alone = newcomer.wait_for("round", lambda said: said["reason"] == "alone", newcomer.now)
    assert alone["contributors"] == [newcomer.peer_id]
    wait_until_gone(third.daemon)
    wait_until_gone(second.daemon)


def test_donor_killed_during_download(peers: list[PeerProcess]) -> None:
    size = {"elements": [6_000_000] * 4, "step_s": 0.4, "local_steps": 40}
    first = PeerProcess(target=1.0, **size)
    peers.append(first)
    address = first.wait_ready()
    second = PeerProcess(target=1.0, join=[address], **size)
    peers.append(second)
    other_address = second.wait_ready()
    wait_averaged(second, first, second)  # so that there is something newer to download
    newcomer = PeerProcess(target=1.0, join=[address, other_address])
    peers.append(newcomer)
    newcomer.wait_for("joined")
    time.sleep(0.1)
    first.kill()
    newcomer.wait_ready()
    newcomer.wait_for("state", lambda said: said["versions"] != [0] * 4)


def test_a_stopped_peer_holds_nobody_up_and_catches_up(peers: list[PeerProcess]) -> None:
    first = PeerProcess(target=1.0, expiry_s=3.0, round_floor_s=2.0)
    peers.append(first)
    address = first.wait_ready()
    second, third = (
        PeerProcess(target=0.0, join=[address], expiry_s=3.0, round_floor_s=2.0) for _ in range(2)
    )
    peers += [second, third]
    second.wait_ready()
    third.wait_ready()
    wait_averaged(first, first, second, third)

    third.signal(signal.SIGSTOP)
    wait_averaged(first, first, second)
    steps = first.wait_for("state", after=first.now)["steps"]
    first.wait_for("state", lambda said: said["steps"] > steps + 20, first.now)
    third.signal(signal.SIGCONT)
    wait_averaged(first, first, second, third)
    wait_same_anchors(first, second, third)
