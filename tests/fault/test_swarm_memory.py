"""What a hostile peer can have another allocate: of the process itself, as the kernel counts it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from swarm_misdeeds import RAIDERS
from swarm_processes import PeerProcess, wait_averaged, wait_same_anchors
from waiting import wait_until

STREAMS = 128
"""Served to one peer at once."""
STREAM_BYTES = 640 << 10
"""Of a stream, at most: a frame as it comes, the same decrypted, what asyncio reads ahead."""
ELEMENTS = 50_000
RAID_S = 12.0


@pytest.mark.parametrize("wire", ["float16", "topk"])
def test_a_raid_takes_no_more_than_its_streams_and_a_fragment(
    peers: list[PeerProcess], tmp_path: Path, wire: str
) -> None:
    """A member opens more streams than it may, and on each says what may take memory."""
    assert RAIDERS > STREAMS
    start = tmp_path / "start"
    settings = {"target": 1.0, "elements": [ELEMENTS, ELEMENTS], "wire": wire, "step_s": 0.1}
    first = PeerProcess(**settings)
    peers.append(first)
    address = first.wait_ready()
    second = PeerProcess(**settings, join=[address])
    raider = PeerProcess(**settings, join=[address], fault="raid", fault_file=str(start))
    peers += [second, raider]
    for peer in (second, raider):
        peer.wait_ready()
    victims = (first, second)
    for victim in victims:
        victim.forget_peak()
    for _ in range(8):  # each fragment four times: what rounds take is there
        wait_averaged(first, first, second, raider)
    before = [victim.most_resident_bytes for victim in victims]
    with start.open("w"):
        raider.wait_for("fault")
    wait_until(lambda: len({said["way"] for said in raider.lines("raided")}) > 8)
    time.sleep(RAID_S)
    for victim, resident in zip(victims, before, strict=True):
        grown = victim.most_resident_bytes - resident
        print(f"grown by {grown >> 20} MiB from {resident >> 20}")
        assert grown < 4 * ELEMENTS + STREAMS * STREAM_BYTES
    raider.kill()
    wait_averaged(first, first, second)
    wait_same_anchors(first, second)
