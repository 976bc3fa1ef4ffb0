"""What a hostile peer can have another allocate: of the process itself, as the kernel counts it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.swarm_misdeeds import HOARDED, RAIDERS
from tests.support.swarm_processes import PeerProcess, wait_averaged, wait_same_anchors
from tests.support.waiting import wait_until

STREAMS = 128
"""Served to one peer at once."""
STREAM_BYTES = 640 << 10
"""Of a stream, at most: a frame as it comes, the same decrypted, what asyncio reads ahead."""
RAID_S = 12.0


Start = Callable[..., tuple[list[PeerProcess], PeerProcess]]


@pytest.fixture
def start(peers: list[PeerProcess], tmp_path: Path) -> Iterator[Start]:
    """Start two victims, and a member that does them harm once it is told to."""

    def begin(fault: str, elements: int, wire: str) -> tuple[list[PeerProcess], PeerProcess]:
        settings = {"target": 1.0, "elements": [elements] * 2, "wire": wire, "step_s": 0.1}
        first = PeerProcess(**settings)
        peers.append(first)
        address = first.wait_ready()
        second = PeerProcess(**settings, join=[address])
        file = str(tmp_path / "start")
        harmful = PeerProcess(**settings, join=[address], fault=fault, fault_file=file)
        peers.extend((second, harmful))
        for peer in (second, harmful):
            peer.wait_ready()
        for victim in (first, second):
            victim.forget_peak()
        for _ in range(8):  # each fragment four times: what rounds take is there
            wait_averaged(first, first, second, harmful)
        return [first, second], harmful

    yield begin
    if len(peers) > 1:
        first, second, harmful = peers
        harmful.kill()
        wait_averaged(first, first, second)
        wait_same_anchors(first, second)


@pytest.mark.parametrize(
    ("wire", "elements"), [("float16", 50_000), ("topk", 50_000), ("float16", 2_000_000)]
)
def test_a_raid_takes_no_more_than_its_streams_and_a_fragment(
    start: Start, tmp_path: Path, wire: str, elements: int
) -> None:
    """A member opens more streams than it may, and on each says what may take memory."""
    assert RAIDERS > STREAMS
    victims, raider = start("raid", elements, wire)
    before = [victim.most_resident_bytes for victim in victims]
    with (tmp_path / "start").open("w"):
        raider.wait_for("fault")
    wait_until(lambda: len({said["way"] for said in raider.lines("raided")}) > 8)
    time.sleep(RAID_S)
    check_growth(victims, before, 4 * elements + STREAMS * STREAM_BYTES)


def test_who_hoards_old_anchors_has_one_of_each_fragment_kept(start: Start, tmp_path: Path) -> None:
    """A member asks for anchors as rounds make them, and takes nothing of what it is sent."""
    fragment_bytes = 8_000_000
    victims, hoarder = start("hoard", fragment_bytes // 4, "float16")
    before = [victim.most_resident_bytes for victim in victims]
    with (tmp_path / "start").open("w"):
        hoarder.wait_for("fault")
    for _ in range(16):
        wait_averaged(victims[0], *victims, hoarder)
    assert max(said["streams"] for said in hoarder.lines("hoarded")) > HOARDED
    check_growth(victims, before, 2 * fragment_bytes + 2 * HOARDED * STREAM_BYTES)


def check_growth(victims: list[PeerProcess], before: list[int], most_bytes: int) -> None:
    for victim, resident in zip(victims, before, strict=True):
        grown = victim.most_resident_bytes - resident
        print(f"grown by {grown >> 20} MiB from {resident >> 20}, at most {most_bytes >> 20}")
        assert grown < most_bytes
