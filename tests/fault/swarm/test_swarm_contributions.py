"""Members contribute otherwise than they learn: the others learn as if they were not there.

One of four lies, and two of eight. `pytest -m matrix` runs all; a few run always.

Without any defence a constant, -9 times the change, and a million times the tokens would show in
the loss. The others end near the same loss by a plain mean, too: of those the tests show that
rounds go on, and that nobody honest is rejected.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from atombench.liars.misdeeds import CONTRIBUTIONS
from tests.support.swarm_problem import ELEMENTS, learnt_by
from tests.support.swarm_processes import PeerProcess, wait_averaged
from tests.support.waiting import wait_until

_SETTINGS = {
    "elements": [ELEMENTS], "expiry_s": 6.0, "round_floor_s": 2.0, "group_size": 0,
}  # fmt: skip
_ALWAYS = {("-9 times", 4), ("next to nothing", 4), ("a million times the tokens", 4)}
_ROUNDS, _DRIFT_ROUNDS = 12, 100
_STATES = 10
"""Whose median is the loss at the end."""
_WITHIN = {4: 1.1, 8: 1.05}
_best = cache(learnt_by)


def _cases() -> list[object]:
    return [
        pytest.param(what, peers, marks=[] if (what, peers) in _ALWAYS else pytest.mark.matrix)
        for what in CONTRIBUTIONS
        for peers in (4, 8)
    ]


def _learn(
    peers: list[PeerProcess], many: int, liars: int, begin: Path, what: str, **settings: object
) -> tuple[list[PeerProcess], list[PeerProcess]]:
    """Start peers of which the last ones lie once all know the line; return honest and liars.

    Not before: until then changes become six times smaller in each round, and whoever misses two
    rounds contributes what is far larger than the others' and is rejected, as it should be.
    """
    sick = {"fault": f"contribute {what}", "fault_file": str(begin)}
    address: list[str] = []
    for index in range(many):
        told = sick if index >= many - liars else {}
        peers.append(PeerProcess(**{**_SETTINGS, **settings}, learns=index, join=address, **told))
        address = address or [peers[0].wait_ready()]
    for peer in peers:
        peer.wait_ready()
    wait_averaged(peers[0], *peers)
    for peer in peers:
        peer.wait_for("state", lambda said: said["loss"] < _WITHIN[many] * _best(many))
    begin.touch()
    for liar in peers[many - liars :]:
        liar.wait_for("fault")
    return peers[: many - liars], peers[many - liars :]


def _wait_together(honest: list[PeerProcess], rounds: int) -> None:
    """Wait until a peer has told of so many more rounds in which all honest ones counted."""
    wanted, begun = {peer.peer_id for peer in honest}, honest[0].now

    def together() -> int:
        told = honest[0].lines("round", begun)
        return sum(wanted <= set(said["contributors"]) for said in told)

    wait_until(lambda: together() >= rounds, together)


def _loss(honest: list[PeerProcess]) -> float:
    losses = [said["loss"] for peer in honest for said in peer.lines("state")[-_STATES:]]
    return statistics.median(losses)


@pytest.mark.parametrize(("what", "many"), _cases())
def test_the_others_learn_as_if_it_were_not_there(
    peers: list[PeerProcess], tmp_path: Path, what: str, many: int
) -> None:
    honest, liars = _learn(peers, many, many // 4, tmp_path / "begin", what)
    begun = {peer: peer.now for peer in honest}
    _wait_together(honest, _DRIFT_ROUNDS if what == "slow drift" else _ROUNDS)
    assert _loss(honest) < _WITHIN[many] * _best(len(honest))
    false = {liar.peer_id[-8:] for liar in liars}
    for peer in honest:
        judged = [text for said in peer.lines("round", begun[peer]) for text in said["rejected"]]
        assert [text for text in judged if text[:8] not in false] == [], "somebody honest"


@pytest.mark.matrix
def test_by_a_plain_mean_they_would_not(peers: list[PeerProcess], tmp_path: Path) -> None:
    honest, _ = _learn(peers, 4, 1, tmp_path / "begin", "a million times the tokens", mean="plain")
    wait_until(lambda: _loss(honest) > 10 * _best(3), lambda: _loss(honest))


@pytest.mark.parametrize("many", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_an_owner_that_gives_one_member_another_mean_is_left_out(
    peers: list[PeerProcess], tmp_path: Path, many: int
) -> None:
    """The victim finds it, and proves it to the others, who have seen nothing."""
    begin = tmp_path / "begin"
    settings = {**_SETTINGS, "elements": [400, 310], "target": 1.0}
    first = PeerProcess(**settings)
    peers.append(first)
    address = first.wait_ready()
    sick = {"fault": f"other bytes to {first.peer_id}", "fault_file": str(begin)}
    peers += [
        PeerProcess(**settings, join=[address], **(sick if index == many - 1 else {}))
        for index in range(1, many)
    ]
    for peer in peers[1:]:
        peer.wait_ready()
    honest, liar = peers[:-1], peers[-1]
    wait_averaged(first, *peers)
    begun = {peer: peer.now for peer in honest}
    begin.touch()
    liar.wait_for("fault")
    for peer in honest:  # rounds go on without it
        wait_averaged(peer, *honest)
    for peer in honest:
        for said in peer.lines("state", begun[peer]):
            assert all(abs(mean - 1.0) < 1.05 for mean in said["means"]), said
    for peer in honest:
        peers.remove(peer)
        written = peer.finish()
        assert "Traceback" not in written
        [told] = [line for line in written.splitlines() if "counts as gone" in line]
        assert liar.peer_id[-8:] in told
        assert "its mean is not that of the contributions" in told


@pytest.mark.matrix
def test_peers_that_are_not_there_hold_up_neither_rounds_nor_newcomers(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    """200 made-up identities; where they say that they are, nobody ever answers."""
    begin = tmp_path / "begin"
    settings = {**_SETTINGS, "elements": [400, 310], "target": 1.0}
    first = PeerProcess(**settings)
    peers.append(first)
    address = first.wait_ready()
    sick = {"fault": "ghosts 200", "fault_file": str(begin)}
    peers += [PeerProcess(**settings, join=[address], **one) for one in ({}, {}, sick)]
    for peer in peers[1:]:
        peer.wait_ready()
    everybody = [*peers]
    wait_averaged(first, *everybody)
    for peer in everybody:
        peer.wait_for("state", lambda said: all(abs(mean - 1.0) < 0.2 for mean in said["means"]))
    begin.touch()
    first.wait_for("state", lambda said: len(said["peers"]) > 100)
    for _ in range(_ROUNDS):
        wait_averaged(first, *everybody)
    newcomer = PeerProcess(**settings, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()
    got = newcomer.wait_for("ready")["means"]
    assert all(abs(mean - 1.0) < 0.4 for mean in got), got
    wait_averaged(newcomer, *everybody, newcomer)
