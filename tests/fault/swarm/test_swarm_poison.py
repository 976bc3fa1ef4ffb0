"""One member gives what no number betrays, finite and plausible: the others' own loss does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.swarm_misdeeds import PLAUSIBLE
from tests.support.swarm_processes import PeerProcess, Said, wait_averaged, wait_same_anchors
from tests.support.waiting import wait_until

_SETTINGS = {
    "target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, "momentum": 0.5, "judges": True,
}  # fmt: skip


def _begun(
    peers: list[PeerProcess], honest: int, *, silence: Path | None = None, **sick: object
) -> tuple[list[PeerProcess], PeerProcess]:
    """Return so many honest peers, and one that is not, when all have averaged.

    What they hand to newcomers is near their target then, too: the first rounds began before they
    were there.

    As long as there is a file `silence`, the honest ones accept questions and do not answer; as
    long as there is one called `rests_file`, nobody makes steps.
    """
    plain = {key: value for key, value in sick.items() if not key.startswith("fault")}
    if silence is not None:
        plain |= {"fault": "mute", "fault_file": str(silence)}
    first = PeerProcess(**{**_SETTINGS, **plain})
    peers.append(first)
    address = first.wait_ready()
    others = [PeerProcess(**{**_SETTINGS, **plain, "join": [address]}) for _ in range(honest - 1)]
    liar = PeerProcess(**{**_SETTINGS, **sick, "join": [address], "judges": False})
    peers += [*others, liar]
    for peer in (*others, liar):
        peer.wait_ready()
    wait_averaged(first, first, *others, liar)
    for peer in (first, *others):
        peer.wait_for("state", lambda said: all(
            abs(mean - 1.0) < 0.2 for mean in (*said["means"], *said["anchor_means"])
        ))  # fmt: skip
    return [first, *others], liar


def _wait_averaged_without(
    seen_by: PeerProcess, liar: PeerProcess, honest: list[PeerProcess]
) -> None:
    """Wait until a peer tells of a new round of these, whoever else took part but the liar."""
    wanted = {peer.peer_id for peer in honest}

    def is_such(said: Said) -> bool:
        members = set(said["contributors"])
        return wanted <= members and liar.peer_id not in members

    seen_by.wait_for("round", is_such, seen_by.now)


def _ended(peers: list[PeerProcess], peer: PeerProcess) -> str:
    peers.remove(peer)
    written = peer.finish()
    assert "Traceback" not in written
    return written


@pytest.mark.parametrize("what", PLAUSIBLE)
def test_nobody_keeps_a_plausible_anchor_that_does_harm(
    peers: list[PeerProcess], tmp_path: Path, what: str
) -> None:
    begin = tmp_path / "begin"
    rests = tmp_path / "rests"
    honest, liar = _begun(
        peers, 3, fault=f"lie {what}", fault_file=str(begin), rests_file=str(rests)
    )
    begun = {peer: peer.now for peer in honest}
    rests.touch()  # a tie lasts until the next round, and all shall see it
    begin.touch()
    liar.wait_for("fault")
    wait_until(lambda: all(_refused(peer, begun[peer]) for peer in honest))
    rests.unlink()
    for why in (why for peer in honest for why in _refused(peer, begun[peer])):
        assert "this peer's loss on its own text would rise" in why or "can have moved" in why
    for peer in honest:  # rounds go on without it
        wait_averaged(peer, *honest)
    wait_same_anchors(*honest)
    for peer in honest:  # at no moment went anybody on with what the liar gave: its mean is 0
        for said in peer.lines("state", begun[peer]):
            assert all(abs(mean - 1.0) < 0.4 for mean in said["means"]), said
    assert all([f"that peer {liar.peer_id[-8:]} gave" in _ended(peers, one) for one in honest])


def _refused(peer: PeerProcess, since: int) -> list[str]:
    """Return why it refused anchors."""
    said = peer.lines("round", since)
    return [one["reason"] for one in said if one["outcome"] == "refused"]


def test_a_lower_hash_wins_nothing_for_what_is_nearly_as_good(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    """It raises the loss by less than the usual margin. Anybody finds one in a few tries."""
    begin, rests = tmp_path / "begin", tmp_path / "rests"
    honest, liar = _begun(
        peers, 3, fault="lie nearly the lower hash", fault_file=str(begin), rests_file=str(rests)
    )
    begun = {peer: peer.now for peer in honest}
    rests.touch()
    begin.touch()
    liar.wait_for("fault")

    def refused() -> list[str]:
        return [why for peer in honest for why in _refused(peer, begun[peer])]

    wait_until(refused)
    assert all("this peer's loss on its own text would rise" in why for why in refused())
    rests.unlink()
    for peer in honest:
        wait_averaged(peer, *honest)
    wait_same_anchors(*honest)
    assert f"that peer {liar.peer_id[-8:]} gave" in "".join(_ended(peers, p) for p in honest)


def test_a_mean_that_does_harm_is_undone_by_all_and_rounds_go_on_from_before(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    """Also where no audit finds it.

    Honest peers may have the bad mean for a moment, and hand it on: who got it fetches nothing of
    them for a while, which is short here, as all times are.
    """
    begin = tmp_path / "begin"
    honest, liar = _begun(
        peers, 3, fault="false mean times -5", fault_file=str(begin), moves_file=str(begin),
        moves_to=3.0, blind=True, barred_s=2.0,
    )  # fmt: skip
    begun = {peer: peer.now for peer in honest}
    begin.touch()
    liar.wait_for("fault")
    for peer in honest:
        refused = peer.wait_for("round", lambda said: said["outcome"] == "refused", begun[peer])
        met = peer.wait_for(
            "round",
            lambda said: (
                set(said["contributors"]) == {p.peer_id for p in honest}
                and said["outcome"] in ("averaged", "partial")
            ),
            begun[peer],
        )
        assert met["fragment"] in (0, 1)
        assert "this peer's loss on its own text would rise" in refused["reason"]
    for peer in honest:  # all get where they want to be
        peer.wait_for("state", lambda said: all(abs(mean - 3.0) < 0.3 for mean in said["means"]))
    wait_same_anchors(*honest)
    for peer in honest:
        for said in peer.lines("state", begun[peer]):
            assert all(mean > 0.7 for mean in said["means"]), said
        _ended(peers, peer)


def test_a_newcomer_takes_no_model_that_is_worse_than_none(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    begin = tmp_path / "begin"
    # Longer than a busy machine stands still: who sees the liar's record only believes it.
    lasting = {"expiry_s": 20.0}
    fault = {"fault": "lie a little better", "fault_file": str(begin)}
    [honest], liar = _begun(peers, 1, **fault, **lasting)
    begin.touch()
    address = liar.wait_for("ready")["address"]
    liar.wait_for("fault")
    honest.wait_for("round", lambda said: said["outcome"] == "refused")
    newcomer = PeerProcess(**{**_SETTINGS, **lasting}, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()
    got = newcomer.wait_for("state")["digests"]
    honest.wait_for("state", lambda said: said["digests"][0] == got[0])
    honest.wait_for("state", lambda said: said["digests"][1] == got[1])
    wait_averaged(newcomer, honest, newcomer)
    _ended(peers, newcomer)

    peers.remove(honest)
    honest.finish()
    last = PeerProcess(**{**_SETTINGS, **lasting}, join=[address])
    peers.append(last)
    text = last.wait_for("error")["text"]
    assert "better than an untrained one" in text
    assert "join through a peer that you trust" in text
    assert "\n" not in text


@pytest.mark.parametrize("what", PLAUSIBLE)
def test_a_newcomer_that_joins_through_a_liar_gets_what_the_honest_ones_have(
    peers: list[PeerProcess], tmp_path: Path, what: str
) -> None:
    """It has no judge: it goes by what most have had. What it does later proves nothing: without a
    judge it goes on with whoever takes part in rounds with it, the liar first."""
    begin = tmp_path / "begin"
    honest, liar = _begun(peers, 3, fault=f"lie {what}", fault_file=str(begin))
    begin.touch()
    liar.wait_for("fault")
    address = liar.wait_for("ready")["address"]
    newcomer = PeerProcess(**{**_SETTINGS, "judges": False}, join=[address])
    peers.append(newcomer)
    got = newcomer.wait_for("ready")["means"]
    for peer in honest:  # perhaps with the newcomer, but without the liar
        _wait_averaged_without(peer, liar, honest)
    told = _ended(peers, newcomer)
    if "could not tell" not in told:  # as long as a record lives nobody answered: a busy machine
        assert all(abs(mean - 1.0) < 0.4 for mean in got), (got, told)


@pytest.mark.parametrize("end", ["never", "in time"])
def test_a_newcomer_does_not_take_silence_for_consent(
    peers: list[PeerProcess], tmp_path: Path, end: str
) -> None:
    """The honest ones accept its questions and do not answer; so it asks them again."""
    begin, silence = tmp_path / "begin", tmp_path / "silence"
    honest, liar = _begun(
        peers, 3, silence=silence, fault="lie the lower hash", fault_file=str(begin)
    )
    silence.touch()
    for peer in honest:
        peer.wait_for("fault")
    begin.touch()
    liar.wait_for("fault")
    address = liar.wait_for("ready")["address"]
    # It asks for as long as a record lives, and half of `connect_s`.
    patience = {"expiry_s": 20.0, "stall_s": 2.0, "connect_s": 5.0 if end == "never" else 120.0}
    newcomer = PeerProcess(**{**_SETTINGS, **patience, "judges": False}, join=[address])
    peers.append(newcomer)
    if end == "in time":
        for peer in honest:
            peer.wait_for("asked")
        silence.unlink()
    got = newcomer.wait_for("ready")["means"]
    told = _ended(peers, newcomer)
    if end == "never":
        assert "this peer could not tell whose is right" in told
    else:
        assert "could not tell" not in told
        assert all(abs(mean - 1.0) < 0.4 for mean in got), (got, told)


def test_a_newcomer_does_not_wait_for_who_was_killed(peers: list[PeerProcess]) -> None:
    settings = {**_SETTINGS, "expiry_s": 60.0, "judges": False}
    first = PeerProcess(**settings)
    peers.append(first)
    address = first.wait_ready()
    killed = PeerProcess(**settings, join=[address])
    peers.append(killed)
    killed.wait_ready()
    wait_averaged(first, first, killed)
    killed.kill()
    newcomer = PeerProcess(**settings, join=[address])
    peers.append(newcomer)
    newcomer.wait_ready()
    assert killed.peer_id in newcomer.wait_for("state")["peers"]  # its record lives
    assert "could not tell" not in _ended(peers, newcomer)
