"""One member of four accepts every invitation and does nothing: the others hardly wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors
from tests.support.waiting import wait_until

pytestmark = pytest.mark.matrix  # the first two rounds wait out their deadlines
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

    def averaged_without_inviting_it() -> bool:
        said = [line for line in first.lines("round", begun) if len(line["contributors"]) == 3]
        invited = [line["round"] for line in ghost.lines("invited")]
        # What it says of the newest round may be on its way.
        later = {line["round"] for line in said[:-1]} - set(invited)
        return len(invited) >= 2 and any(r > invited[1] for r in later)

    wait_until(averaged_without_inviting_it)
    wait_same_anchors(*honest)
