"""The table of peers for views: whole, not too often, and never a burden."""

from __future__ import annotations

import json
from pathlib import Path

from atomtrain.swarm.membership.records import PeerStatus
from atomtrain.training.together.swarm_file import SwarmFile
from atomtrain.views.runs.files import SWARM_FILE


def status(name: str) -> PeerStatus:
    return PeerStatus(
        peer_id=f"id-{name}", name=name, is_self=False, state="training", next_round=1, steps=2,
        tokens=3, tokens_per_s=4.0, step_s=0.5, free_bytes_per_s=0.0, behind=0, reachable=True,
        addresses=("/a",), seen_s=6.0,
    )  # fmt: skip


def test_it_is_written_when_it_is_due(tmp_path: Path) -> None:
    now_s = [0.0]
    file = SwarmFile(tmp_path, lambda: now_s[0])
    assert file.update(lambda: [status("a")])
    assert not file.update(lambda: [status("b")])
    now_s[0] = 1.0
    assert file.update(lambda: [status("b")])
    table = json.loads((tmp_path / SWARM_FILE).read_text())
    assert [peer["name"] for peer in table["peers"]] == ["b"]
    assert table["peers"][0]["seen_s"] == 6.0
    assert [path.name for path in tmp_path.iterdir()] == [SWARM_FILE]


def test_writing_takes_a_hundredth_of_the_time_at_most(tmp_path: Path) -> None:
    times_s = iter([0.0, 0.5, 40.0, 49.0, 51.0, 51.0])
    file = SwarmFile(tmp_path, lambda: next(times_s))
    assert file.update(list)  # took half a second
    assert not file.update(list)
    assert not file.update(list)
    assert file.update(list)


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    SwarmFile(tmp_path / "gone", lambda: 0.0).update(list)
