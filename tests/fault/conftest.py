"""What tests with peers in processes of their own share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.swarm_processes import PeerProcess


@pytest.fixture
def peers() -> Iterator[list[PeerProcess]]:
    """Peers that end with the test; none may have printed a traceback."""
    started: list[PeerProcess] = []
    yield started
    printed = [peer.finish() for peer in started]
    assert "Traceback" not in "".join(printed)
