"""One member claims a version more of every fragment, and gives it to nobody: rounds go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors
from tests.support.waiting import wait_until

_SETTINGS = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "momentum": 0.5}
_ROUNDS = 24
"""That each honest member tells of: enough for what nobody certifies to be asked for twice."""


@pytest.mark.parametrize("how", ["withhold", "withhold, signed"])
def test_rounds_of_the_others_go_on(peers: list[PeerProcess], tmp_path: Path, how: str) -> None:
    first = PeerProcess(**_SETTINGS)
    peers.append(first)
    address = first.wait_ready()
    begin = tmp_path / "begin"
    sick = {"fault": how, "fault_file": str(begin)}
    joined = [PeerProcess(**_SETTINGS, join=[address], **one) for one in ({}, {}, sick)]
    peers += joined
    for peer in joined:
        peer.wait_ready()
    honest, liar = [first, *joined[:2]], joined[2]
    wait_averaged(first, *honest, liar)

    begin.touch()
    liar.wait_for("fault")
    begun = {peer: peer.now for peer in honest}
    members = {peer.peer_id for peer in honest}
    for peer in honest:
        wait_until(lambda peer=peer: len(peer.lines("round", begun[peer])) >= _ROUNDS)
        told = peer.lines("round", begun[peer])[:_ROUNDS]
        averaged = [said for said in told if set(said["contributors"]) == members]
        assert {said["fragment"] for said in averaged} == {0, 1}
        # Not those that the liar leads: a quarter.
        assert len(averaged) >= _ROUNDS / 2, [(s["outcome"], s["reason"]) for s in told]
    wait_same_anchors(*honest)
