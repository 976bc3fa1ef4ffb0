"""One member tells of anchors that nobody has made: the others go on as if it were not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarm_misdeeds import LIES
from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors

_SETTINGS = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "momentum": 0.5}


@pytest.mark.parametrize("what", LIES)
def test_nobody_takes_what_a_liar_tells(
    peers: list[PeerProcess], tmp_path: Path, what: str
) -> None:
    first = PeerProcess(**_SETTINGS)
    peers.append(first)
    address = first.wait_ready()
    begin = tmp_path / "begin"
    sick = {"fault": f"lie {what}", "fault_file": str(begin)}
    joined = [PeerProcess(**_SETTINGS, join=[address], **one) for one in ({}, {}, sick)]
    peers += joined
    for peer in joined:
        peer.wait_ready()
    honest, liar = [first, *joined[:2]], joined[2]
    wait_averaged(first, *honest, liar)
    for peer in honest:
        peer.wait_for("state", lambda said: all(abs(mean - 1.0) < 0.2 for mean in said["means"]))

    begun = {peer: peer.now for peer in honest}
    begin.touch()
    liar.wait_for("fault")
    for peer in honest:  # rounds go on without it
        wait_averaged(peer, *honest)
    wait_averaged(first, *honest)
    wait_same_anchors(*honest)
    newcomer = PeerProcess(**_SETTINGS, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()
    wait_averaged(newcomer, *honest, newcomer)
    wait_same_anchors(*honest, newcomer)

    for peer in honest:  # at no moment had anybody what the liar told of
        for said in peer.lines("state", begun[peer]):
            # The liar's values have a mean of about 0.
            assert all(abs(mean - 1.0) < 0.5 for mean in said["means"]), said
            assert max(said["versions"]) < 10**5
        peers.remove(peer)
        written = peer.finish()
        assert "Traceback" not in written
        told = [line for line in written.splitlines() if "counts as gone" in line]
        # What nothing certifies waits, and may not have been fetched; numbers tell the other lies.
        assert len(told) == 1 or (what == "NaN" and not told)
        assert all(liar.peer_id[-8:] in line for line in told)
