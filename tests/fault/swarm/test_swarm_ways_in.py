"""Real processes: wrong clocks, lost contacts, runs found on the network, late newcomers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from atomtrain.errors import SwarmError
from atomtrain.swarm.membership import lan
from atomtrain.swarm.membership.known_peers import read_known
from tests.support.swarm_processes import PeerProcess, wait_averaged
from tests.support.waiting import wait_until


def start(peers: list[PeerProcess], **settings: object) -> PeerProcess:
    peers.append(PeerProcess(**{"target": 1.0, **settings}))
    return peers[-1]


def test_peers_whose_clocks_are_an_hour_off_take_part(peers: list[PeerProcess]) -> None:
    first = start(peers)
    ahead = start(peers, join=[first.wait_ready()], clock_off_s=3600.0)
    # The third learns the time from the one whose clock is off.
    behind = start(peers, join=[ahead.wait_ready()], clock_off_s=-3600.0)
    behind.wait_ready()
    wait_averaged(first, first, ahead, behind)
    ahead.kill()
    wait_averaged(first, first, behind)


def test_a_restarted_peer_finds_the_run_when_its_first_contact_is_gone(
    peers: list[PeerProcess], tmp_path: Path
) -> None:
    kept = str(tmp_path / "peers.json")
    first = start(peers)
    address = first.wait_ready()
    second = start(peers, join=[address])
    second.wait_ready()
    third = start(peers, join=[address], peers_file=kept)
    third.wait_ready()
    wait_averaged(third, first, second, third)
    everybody = {peer.peer_id for peer in (first, second, third)}
    wait_until(lambda: set(read_known("fault", Path(kept))) == everybody)
    third.kill()
    first.kill()  # the only peer that the third was told of
    again = start(peers, join=[address], peers_file=kept)
    again.wait_ready()
    wait_averaged(again, second, again)
    without_any = start(peers, rejoin=True, peers_file=kept)
    without_any.wait_ready()
    wait_averaged(second, second, again, without_any)


def test_a_run_is_found_on_the_local_network(peers: list[PeerProcess]) -> None:
    """On loopback: peers that listen there answer there, and nowhere else."""
    run, other, hidden_run = (f"fault-{name}-{os.getpid()}" for name in ("lan", "other", "hidden"))
    first = start(peers, run=run, discoverable=True)
    address = first.wait_ready()
    start(peers, run=other, discoverable=True).wait_ready()
    hidden = start(peers, run=hidden_run)
    hidden.wait_ready()
    if not all(lan.search(name, 10.0, "127.0.0.1") for name in (run, other)):
        pytest.skip("no multicast on this machine's loopback")
    found: set[str] = set()

    def both_found() -> bool:
        found.update(peer.run for peer in lan.search(None, 1.0, "127.0.0.1"))
        return found >= {run, other}

    wait_until(both_found, lambda: str(found))
    assert hidden_run not in found
    # Whoever stands still for a moment does not answer in time.
    wait_until(lambda: _told(run) == str((run, (address,))), lambda: _told(run))
    wait_until(lambda: "--join lan --run " in _told(None), lambda: _told(None))
    assert "paste its address" in _told(hidden_run)
    wait_averaged(first, first, _joined(peers, run, address))


def _told(run: str | None) -> str:
    """Return what somebody who joins on the network finds there, or is told."""
    try:
        return str(lan.find(run, "127.0.0.1"))
    except SwarmError as error:
        return str(error)


def _joined(peers: list[PeerProcess], run: str, address: str) -> PeerProcess:
    peer = start(peers, run=run, join=[address])
    peer.wait_ready()
    return peer


def test_killed_peers_leave_no_folders_behind(
    peers: list[PeerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # sockets need short paths
        monkeypatch.setenv("TMPDIR", place)
        first = start(peers)
        first.wait_ready()
        (folder,) = Path(place).iterdir()
        names = {entry.name.partition("-")[0] for entry in folder.iterdir()}
        assert names == {"control.sock", "lock", "p2pclient"}, "and no key"
        first.kill()
        assert folder.exists()
        second = start(peers)
        second.wait_ready()
        assert not folder.exists()
        second.finish()
        peers.remove(second)
        assert not any(Path(place).iterdir())


def test_a_newcomer_is_told_at_once_that_all_have_finished(peers: list[PeerProcess]) -> None:
    first = start(peers, linger_s=600.0)
    address = first.wait_ready()
    first.end()
    first.wait_for("leaving")
    late = start(peers, join=[address])
    assert "it has finished, and leaves the run" in late.wait_for("error")["text"]
    first.kill()  # it would still answer, and has not gone
