"""One member sends all that it sends byte by byte: nobody is held by that for long."""

from __future__ import annotations

from pathlib import Path

from tests.support.swarm_processes import PeerProcess, Said, wait_averaged, wait_same_anchors

_SETTINGS = {
    "target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "stall_s": 3.0, "momentum": 0.5,
}  # fmt: skip


def test_rounds_fetches_and_joining_go_on(peers: list[PeerProcess], tmp_path: Path) -> None:
    first = PeerProcess(**_SETTINGS)
    peers.append(first)
    address = first.wait_ready()
    begin = tmp_path / "begin"
    sick = {"fault": "drip", "fault_file": str(begin)}
    joined = [PeerProcess(**_SETTINGS, join=[address], **one) for one in ({}, {}, sick)]
    peers += joined
    for peer in joined:
        peer.wait_ready()
    honest, dripper = [first, *joined[:2]], joined[2]
    wait_averaged(first, *honest, dripper)

    begin.touch()
    dripper.wait_for("fault")
    for peer in honest:  # its contribution and its means come to their end in no round

        def without(said: Said) -> bool:
            members = {peer.peer_id for peer in honest}
            return (
                members <= set(said["contributors"]) and dripper.peer_id not in said["contributors"]
            )

        peer.wait_for("round", without, peer.now)
    wait_same_anchors(*honest)

    newcomer = PeerProcess(**_SETTINGS, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()  # it fetches two fragments at once, each from another donor

    held = PeerProcess(**_SETTINGS, join=[dripper.wait_for("ready")["address"]])
    peers.append(held)
    assert "is reached, but has not answered" in held.wait_for("error")["text"]
    assert {peer.peer_id for peer in [*honest, newcomer]} & {
        said["to"] for said in dripper.lines("dripped")
    }
