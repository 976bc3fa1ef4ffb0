"""Claims that are certified, or not: of anchors that nobody gives, or that do harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from atomtrain.swarm.transport.identity import Identity
from tests.support.swarm_processes import PeerProcess, Said, wait_averaged, wait_same_anchors
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


def test_what_two_members_make_and_certify_among_themselves_is_tried_and_undone(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    """All have contributed before, so their certificates count; and they claim more tokens.

    Newcomers have no certificates to go by: with a judge one goes by its loss, without by what most
    have had.
    """
    judging = {**_SETTINGS, "judges": True}
    first = PeerProcess(**judging)
    peers.append(first)
    address = first.wait_ready()
    begin = tmp_path / "begin"
    files = [tmp_path / "one.key", tmp_path / "other.key"]
    ids = [Identity.load_or_create(file).peer_id for file in files]
    sick = {"fault_file": str(begin), "moves_file": str(begin), "moves_to": -5.0}
    honest = [first, *(PeerProcess(**judging, join=[address]) for _ in range(2))]
    liars = [
        PeerProcess(
            **{**_SETTINGS, **sick}, join=[address], identity=str(file),
            fault=f"conspire with {ally}",
        )
        for file, ally in zip(files, reversed(ids), strict=True)
    ]  # fmt: skip
    peers += [*honest[1:], *liars]
    for peer in [*honest[1:], *liars]:
        peer.wait_ready()
    wait_averaged(first, *honest, *liars)
    for peer in honest:
        peer.wait_for("state", lambda said: all(abs(mean - 1.0) < 0.2 for mean in said["means"]))

    begun = {peer: peer.now for peer in peers}
    begin.touch()
    for liar in liars:
        liar.wait_for("fault")
        for fragment in range(2):

            def theirs(said: Said, fragment: int = fragment) -> bool:
                return said["fragment"] == fragment and set(said["contributors"]) == set(ids)

            liar.wait_for("round", theirs, begun[liar])
    for peer in honest:
        refused = peer.wait_for("round", lambda said: said["outcome"] == "refused", begun[peer])
        # After many rounds that nobody else saw, theirs are too far away to be tried.
        reasons = ("this peer's loss on its own text would rise", "rounds can have moved them")
        assert any(reason in refused["reason"] for reason in reasons), refused["reason"]

    through = liars[0].wait_for("ready")["address"]
    newcomers = [PeerProcess(**{**_SETTINGS, "judges": it}, join=[through]) for it in (True, False)]
    peers += newcomers
    got = [newcomer.wait_for("ready")["means"] for newcomer in newcomers]
    for peer in honest:  # rounds go on, in which the liars have no part

        def without(said: Said) -> bool:
            members = set(said["contributors"])
            return {one.peer_id for one in honest} <= members and members.isdisjoint(ids)

        peer.wait_for("round", without, peer.now)
    for peer in honest:
        for said in peer.lines("state", begun[peer]):
            assert all(abs(mean - 1.0) < 0.4 for mean in said["means"]), said
    told = []
    for newcomer in newcomers:
        peers.remove(newcomer)
        told.append(newcomer.finish())
    assert "Traceback" not in "".join(told)
    assert all(abs(mean - 1.0) < 0.4 for mean in got[0]), (got, told)
    if "could not tell" not in told[1]:
        assert all(abs(mean - 1.0) < 0.4 for mean in got[1]), (got, told)
