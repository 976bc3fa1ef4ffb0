"""One member of four accepts every invitation and does nothing: the others hardly wait for it."""

from __future__ import annotations

from pathlib import Path

from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors

_SETTINGS = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 1.0}


def test_a_member_that_takes_no_part_is_hardly_invited(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    first = PeerProcess(**_SETTINGS)
    peers.append(first)
    address = first.wait_ready()
    begin = tmp_path / "begin"
    sick = {"fault": "haunt", "fault_file": str(begin)}
    joined = [PeerProcess(**_SETTINGS, join=[address], **one) for one in ({}, {}, sick)]
    peers += joined
    for peer in joined:
        peer.wait_ready()
    honest, ghost = [first, *joined[:2]], joined[2]
    wait_averaged(first, *honest, ghost)

    begin.touch()
    ghost.wait_for("fault")
    begun = first.now
    next_round = ghost.wait_for("invited")["round"]
    first.wait_for(
        "round",
        lambda said: len(said["contributors"]) == 3 and said["round"] >= next_round + 12,
        begun,
    )
    invited = [said["round"] for said in ghost.lines("invited")]
    assert 2 <= len(invited) <= 5, invited
    wait_same_anchors(*honest)
