"""What a peer says of its swarm is a claim: it must not stop who asked."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.errors import BadMessage
from atomtrain.swarm.node.probe import receive_status
from atomtrain.views.dashboard.remote import SwarmSource


def received(text: str) -> dict[str, Any]:
    """Return what is made of a status that a peer sends."""
    data = text.encode()

    async def receive(*_: Any) -> Any:
        return SimpleNamespace(bytes_count=len(data))

    async def receive_into(view: memoryview) -> None:
        view[:] = data

    channel: Any = SimpleNamespace(receive=receive, receive_into=receive_into)
    return asyncio.run(receive_status(channel, 1.0))


@pytest.mark.parametrize("text", ["[]", "{", '{"peers": ' + "[" * 900 + "]" * 900 + "}"])
def test_what_is_no_status_is_refused(text: str) -> None:
    with pytest.raises(BadMessage, match="the status is not"):
        received(text)


@pytest.mark.parametrize("number", ["1e999", "NaN", "[]", '"x"', "null"])
def test_rounds_that_make_no_sense_are_not_shown(number: str) -> None:
    peers = [{"peer_id": "a", "name": "A"}]
    odd = {"round": json.loads(number), "fragment": 0, "reduces": [{"peer_id": "a"}]}
    source = SwarmSource.__new__(SwarmSource)
    source._rounds = {}
    assert source._new_rounds({"peers": peers, "rounds": [{**odd, "round": 1}, odd]}, 1.0) == [
        source._rounds[1, 0]
    ]
