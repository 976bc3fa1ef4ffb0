"""A swarm seen from outside: its table follows it, and says so when nobody answers any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm import Manifest, Swarm
from atomtrain.views.dashboard.remote import ASKED, SwarmSource
from atomtrain.views.dashboard.source import Message
from tests.support.swarm_configs import swarm_config
from tests.support.waiting import PATIENCE_S

ELEMENTS = (300, 50)


class Model:
    """Fragments that nothing trains."""

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield torch.zeros(ELEMENTS[index])


def until(source: SwarmSource, found: Callable[[Message], bool]) -> Message:
    """Return the first message that is wanted."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        for message in source.poll():
            if found(message):
                return message
        assert time.monotonic() < end_s
        time.sleep(0.05)


def rows_of(message: Message) -> list[dict[str, Any]]:
    return message.body["rows"] if message.kind == "swarm" else []


def test_a_swarm_is_followed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.views.dashboard.remote._FIRST_S", PATIENCE_S)
    config = swarm_config(run="watched", name="first", listen_host="127.0.0.1", discoverable=False)
    founder = Swarm.found(config, Manifest("watched", ELEMENTS), Model())
    outside = swarm_config(
        run="watched", listen_host="127.0.0.1", discoverable=False, connect_s=30.0
    )
    source = None
    try:
        source = SwarmSource(outside, [founder.address])
        (row,) = rows_of(until(source, lambda message: bool(rows_of(message))))
        assert (row["name"], row["state"]) == ("first", "training")
        founder.boundary(steps=7, tokens=50, tokens_per_s=25.0, step_s=1.0, access=Model())
        until(source, lambda message: any(row["steps"] == 7 for row in rows_of(message)))
        assert [row["steps"] for row in rows_of(source.snapshot()[-1])] == [7]
        founder.leave(1.0)
        told = until(source, lambda message: message.kind == "events")
        assert told.body["peer"] == ASKED
        assert "no peer of the swarm answers" in told.body["events"][0]["message"]
    finally:
        founder.leave(1.0)
        if source is not None:
            source.close()


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.views.dashboard.remote._FIRST_S", 3.0)
    config = swarm_config(run="nobody", listen_host="127.0.0.1", discoverable=False, connect_s=1.0)
    address = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJCGm3rTQcJcNZEtzqgqBRGP9Nm5aTDuHkrKyQu1RRpqQ"
    with pytest.raises(SwarmError, match="no peer of run 'nobody' answered"):
        SwarmSource(config, [address])
