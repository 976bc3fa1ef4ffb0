"""What `atom swarm status` says of rounds: who reduces which slices, now and in the last one."""

from __future__ import annotations

import asyncio
import re

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.cli.swarm import _table
from atomtrain.swarm.node.probe import status_of
from tests.support.swarm_virtual import Simulation


@pytest.mark.slow
def test_status_says_who_reduces_what() -> None:
    async def scenario() -> None:
        simulation = Simulation((6000, 50), seed=3, local_steps_per_round=4)
        peers = [await simulation.add(name, step_s=0.5) for name in "abc"]
        context, rounds = peers[0].service.context, peers[0].service._rounds
        seen = set()
        for _ in range(400):
            await asyncio.sleep(0.05)
            status = status_of(context, rounds.groups())
            for entry in status["rounds"]:
                seen.add(entry["under_way"])
                assert entry["fragment"] == entry["round"] % 2
                slices = [
                    index
                    for share in entry["reduces"]
                    for index in range(share["first_slice"], share["first_slice"] + share["slices"])
                ]
                assert slices == list(range(len(entry["reduces"]))), "each has one, of so few"
        assert seen == {True, False}
        last = _table(status).splitlines()[-1]
        members = "".join(share["peer_id"] for share in status["rounds"][-1]["reduces"])
        assert members == "abc"
        assert re.fullmatch(
            r"last: round \d+, fragment [01], reduced by a \(slice 0\), b \(slice 1\), "
            r"c \(slice 2\)",
            last,
        ), last

    run_virtual(scenario)
