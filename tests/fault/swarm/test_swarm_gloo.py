"""Rounds over Gloo, with real processes: equal anchors, a kill in the middle, a newcomer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import ConfigError
from tests.support.swarm_configs import swarm_config
from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors

_LARGE = {"elements": [4_000_000], "step_s": 0.05, "local_steps": 1, "transport": "gloo"}
_OVER_GLOO: dict[str, Any] = {"transport": "gloo", "wire": "float32"}


def test_members_die_and_join_and_anchors_stay_equal(peers: list[PeerProcess]) -> None:
    first = PeerProcess(target=1.0, **_LARGE)
    peers.append(first)
    address = first.wait_ready()
    second, third = (PeerProcess(target=t, join=[address]) for t in (-1.0, 0.0))
    peers += [second, third]
    second.wait_ready()
    third.wait_ready()
    wait_averaged(second, first, second, third)
    third.kill()  # rounds follow each other at once: mostly in the middle of one
    wait_averaged(second, first, second)
    newcomer = PeerProcess(target=0.5, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()
    wait_averaged(newcomer, first, second, newcomer)

    # A version alone names no anchor: a peer that sees nobody for a moment goes on by itself.
    wait_same_anchors(first, second, newcomer)
    anchors: dict[str, set[str]] = {}
    for peer in (first, second, newcomer):
        for said in peer.lines("state"):
            if (round_id := said["rounds"][0]) != "":
                anchors.setdefault(round_id, set()).add(said["digests"][0])
    assert all(len(digests) == 1 for digests in anchors.values())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"transport": "glo"}, "Did you mean 'gloo'"),
        ({"transport": "gloo", "wire": "int4"}, "plain means of float32, not int4"),
        ({"transport": "gloo", "wire": "float32", "mean": "clipped"}, "not clipped ones"),
        (_OVER_GLOO, "--run-key FILE or --allow FILE"),
        (
            {**_OVER_GLOO, "listen_host": "127.0.0.1", "announce_host": "192.0.2.1"},
            "--run-key FILE or --allow FILE",
        ),
    ],
)
def test_what_gloo_cannot_do_is_told(wrong: dict[str, Any], says: str) -> None:
    swarm_config(run="r", **_OVER_GLOO, listen_host="127.0.0.1")
    swarm_config(run="r", **_OVER_GLOO, key_path=Path("key"))
    swarm_config(run="r", **_OVER_GLOO, allow_path=Path("ids"))
    with pytest.raises(ConfigError, match=says):
        swarm_config(run="r", **wrong)
