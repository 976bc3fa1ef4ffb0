"""One member of four lies in rounds: the others' model does not follow it.

It trains towards the same target as they do, until it begins to lie.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors

_SETTINGS = {
    "target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "elements": [400, 310],
}  # fmt: skip


class Four:
    """Three honest peers and one that will lie."""

    def __init__(self, peers: list[PeerProcess], begin: Path, fault: str) -> None:
        first = PeerProcess(**_SETTINGS)
        peers.append(first)
        address = first.wait_ready()
        sick = {"fault": fault, "fault_file": str(begin)}
        joined = [PeerProcess(**_SETTINGS, join=[address], **one) for one in ({}, {}, sick)]
        peers += joined
        for peer in joined:
            peer.wait_ready()
        self.honest, self.liar = [first, *joined[:2]], joined[2]
        wait_averaged(first, *self.honest, self.liar)
        for peer in self.honest:
            peer.wait_for("state", lambda said: all(abs(m - 1.0) < 0.2 for m in said["means"]))
        self.begun = {peer: peer.now for peer in self.honest}
        begin.touch()
        self.liar.wait_for("fault")

    def check_kept(self) -> None:
        """No honest peer has been moved from the target since."""
        for peer in self.honest:
            for said in peer.lines("state", self.begun[peer]):
                assert all(abs(mean - 1.0) < 0.5 for mean in said["means"]), said


LONG, FALSE = "longer than what it is the mean of", "not that of the contributions"


@pytest.mark.parametrize(
    ("fault", "flaw"),
    [
        ("false mean times -5", LONG),
        ("false mean times -1", FALSE),
        ("false mean times 0.98", FALSE),
        ("false number times 5", LONG),
    ],
)
def test_an_owner_that_returns_another_mean_is_left_out(
    peers: list[PeerProcess], tmp_path: Path, fault: str, flaw: str
) -> None:
    """The false number is in one chunk: that the mean is too long is seen without an audit."""
    four = Four(peers, tmp_path / "begin", fault)
    for peer in four.honest:  # rounds go on without it
        wait_averaged(peer, *four.honest)
    wait_same_anchors(*four.honest)
    four.check_kept()
    for peer in four.honest:
        peers.remove(peer)
        written = peer.finish()
        assert "Traceback" not in written
        told = [line for line in written.splitlines() if "counts as gone" in line]
        assert len(told) == 1
        assert four.liar.peer_id[-8:] in told[0]
        assert f"its mean is {flaw}" in told[0]
