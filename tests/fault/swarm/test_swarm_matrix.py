"""Every fault against every role, with real processes: the others go on, and hold the same.

Takes long, so it runs on request only: `pytest -m matrix tests/fault`. Every member of a
round contributes to all slices and reduces some: `corrupt` and `replay` spoil what a peer
contributes, `false mean` what it reduces, the others hit both. The two roles differ in whom a fault
hits: the peer that founded the run, and through which all came, or one that joined.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import namespaces
from tests.support.swarm_misdeeds import MISDEEDS, check_means
from tests.support.swarm_peer import STAGES
from tests.support.swarm_processes import PeerProcess, wait_same_anchors
from tests.support.waiting import wait_until

pytestmark = pytest.mark.matrix
OUTSIDE = ("kill", "stop", "restart", "clock")
LONGEST_ROUND_S = 30.0
"""Of small fragments on loopback: far above what their deadlines are on a machine that runs."""
SENT = ("corrupt", "replay", "false mean", "flood", "slow", "full disk")


class Trio:
    """Three peers that average, of which one will have a fault."""

    def __init__(
        self,
        peers: list[PeerProcess],
        role: str,
        folder: Path,
        fault: str,
        hosts: Sequence[dict[str, Any]] = ({}, {}, {}),
        **more: Any,
    ) -> None:
        """Start them, each on a host of its own if there are some; a newcomer is on the last."""
        settings: dict[str, Any] = {"target": 1.0, "expiry_s": 4.0, "round_floor_s": 2.0, **more}
        self.start_fault = folder / "start"
        start = str(self.start_fault)
        sick = {} if fault in OUTSIDE else {"fault": fault, "fault_file": start}
        sick |= {"clock_off_s": 3600.0} if fault == "clock" else {}
        sick |= {"identity": str(folder / "key"), "peers_file": str(folder / "peers.json")}
        first = PeerProcess(**settings, **hosts[0], **(sick if role == "founder" else {}))
        peers.append(first)
        self.address = first.wait_ready()
        others = [
            PeerProcess(**settings, join=[self.address], **host, **one)
            for host, one in zip(hosts[1:], ({}, {} if role == "founder" else sick), strict=True)
        ]
        peers += others
        for other in others:
            other.wait_ready()
        self.victim, *self.healthy = [first, *others] if role == "founder" else [
            others[1], first, others[0],
        ]  # fmt: skip
        self.settings, self.sick = settings, sick
        self.wait_averaged({first, *others})

    def wait_averaged(self, members: set[PeerProcess]) -> None:
        """Wait for a round of these members, seen by a healthy one."""
        wanted = {member.peer_id for member in members}
        seen_by = self.healthy[0]
        seen_by.wait_for("round", lambda said: wanted <= set(said["contributors"]), seen_by.now)

    def check(self) -> None:
        """The healthy ones average, hold the same, and learn what they shall."""
        self.wait_averaged(set(self.healthy))
        wait_same_anchors(*self.healthy)
        for peer in self.healthy:
            peer.wait_for(
                "state", lambda said: all(abs(mean - 1.0) < 0.5 for mean in said["means"]), peer.now
            )


@pytest.mark.parametrize("role", ["founder", "newcomer"])
@pytest.mark.parametrize("fault", [*OUTSIDE, *SENT])
def test_fault(peers: list[PeerProcess], tmp_path: Path, fault: str, role: str) -> None:
    trio = Trio(peers, role, tmp_path, fault)
    victim = trio.victim
    if fault in SENT:
        trio.start_fault.touch()
        victim.wait_for("fault")
    elif fault != "clock":
        time.sleep(1.0)
        victim.signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    trio.check()
    if fault == "stop":
        time.sleep(10.0)  # longer than records live
        victim.signal(signal.SIGCONT)
        trio.wait_averaged({victim, *trio.healthy})
    if fault == "restart":
        again = PeerProcess(**trio.settings, **trio.sick, rejoin=True)
        peers.append(again)
        again.wait_ready()
        assert again.peer_id == victim.peer_id
        trio.wait_averaged({again, *trio.healthy})
    if fault in ("slow", "full disk", "clock", "flood"):
        trio.wait_averaged({victim, *trio.healthy})
    trio.check()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_at_every_stage(peers: list[PeerProcess], tmp_path: Path, fault: str, stage: str) -> None:
    """A process falls in the middle of a round, as contributor, owner of slices or leader."""
    trio = Trio(peers, "newcomer", tmp_path, f"{fault} at {stage}")
    victim = trio.victim
    trio.start_fault.touch()
    wait_until(lambda: victim.state() in "TXZ", victim.state)
    trio.check()
    if fault == "stop":
        time.sleep(10.0)  # longer than records live
        victim.signal(signal.SIGCONT)
        trio.wait_averaged({victim, *trio.healthy})
        trio.check()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_misdeeds_at_every_stage(
    peers: list[PeerProcess], tmp_path: Path, misdeed: str, stage: str
) -> None:
    """What a member sends at one stage is garbage, or old, or a flood, or late, in every round.

    As contributor, owner or leader, by the stage. The others' means are exactly those of who
    counted, no round of theirs hangs, and who was only slow is no less a member.
    """
    trio = Trio(
        peers, "newcomer", tmp_path, f"{misdeed} at {stage}",
        elements=[40, 31], wire="float32", record=True,
    )  # fmt: skip
    victim, everybody = trio.victim, {trio.victim, *trio.healthy}
    begun = [peer.now for peer in trio.healthy]
    trio.start_fault.touch()
    victim.wait_for("misdeed")
    trio.check()

    def lies() -> int:
        """An old mean is not signed for this round: both others leave out who sends it one."""
        old = misdeed == "replay"
        return old * sum(line["sent"] == "Mean" for line in victim.lines("misdeed"))

    wait_until(
        lambda: len(victim.lines("misdeed")) > 2 or lies() > 1, lambda: victim.lines("misdeed")
    )
    trio.check()
    if misdeed == "slow":
        trio.wait_averaged(everybody)
    for peer, now in zip(trio.healthy, begun, strict=True):
        durations_s = [line["duration_s"] for line in peer.lines("round", now)]
        assert max(durations_s) < LONGEST_ROUND_S
    trio.start_fault.unlink()
    if misdeed != "corrupt" and not lies():  # there is no evidence of ill will
        trio.wait_averaged(everybody)
    trio.check()
    said = {peer.peer_id: peer.lines("took") + peer.lines("merged") for peer in everybody}
    if misdeed in ("corrupt", "replay"):
        said[victim.peer_id] += victim.lines("misdeed")
    assert check_means(said) > 3


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or bool(os.environ.get("CI")) or shutil.which("nft") is None,
    reason="needs root and nft",
)
@pytest.mark.parametrize("stage", STAGES)
def test_cut_off_at_every_stage(peers: list[PeerProcess], tmp_path: Path, stage: str) -> None:
    """A host's cable is pulled out in the middle of a round: no stream ends, nothing more comes."""
    with namespaces(3) as network:
        hosts = [{"within": network.entering(i), "host": network.address(i)} for i in range(3)]
        trio = Trio(peers, "newcomer", tmp_path, f"cut at {stage}", hosts)
        victim = trio.victim
        trio.start_fault.touch()
        victim.wait_for("cut off")
        trio.check()
        victim.wait_for("round", lambda said: said["reason"] == "alone", victim.now)
        mend = [*network.entering(2), "nft", "delete", "table", "inet", "cut"]
        subprocess.run(mend, check=True, timeout=20)
        trio.wait_averaged({victim, *trio.healthy})
        trio.check()


def test_wrong_key(peers: list[PeerProcess], tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"the {name} secret of this run")
    right, wrong = str(tmp_path / "right"), str(tmp_path / "wrong")
    first = PeerProcess(target=1.0, key=right)
    peers.append(first)
    address = first.wait_ready()
    for key in ({"key": wrong}, {}):
        stranger = PeerProcess(target=5.0, join=[address], **key)
        peers.append(stranger)
        assert "admits only peers that know" in stranger.wait_for("error")["text"]
    friend = PeerProcess(target=1.0, join=[address], key=right)
    peers.append(friend)
    friend.wait_ready()
    both = {first.peer_id, friend.peer_id}
    first.wait_for("round", lambda said: set(said["contributors"]) == both, first.now)
