"""Whether a swarm on a virtual clock goes on, looked at each second."""

from __future__ import annotations

import asyncio

from tests.support.swarm_virtual import Simulation

GO_ON_S = 90
"""In which every fragment must be averaged again, twice, whatever has happened."""


async def all_go_on(simulation: Simulation) -> None:
    """Wait until each peer has had two more versions of each fragment.

    Two halves that meet again take the anchors that more tokens went into, whose versions may be
    lower: these are then what there have to be two more of.
    """
    before = {name: peer.versions() for name, peer in simulation.peers.items()}
    for _ in range(GO_ON_S):
        await asyncio.sleep(1)
        behind = {}
        for name, peer in simulation.peers.items():
            now = peer.versions()
            before[name] = [min(pair) for pair in zip(before[name], now, strict=True)]
            if any(new < old + 2 for new, old in zip(now, before[name], strict=True)):
                behind[name] = (before[name], now)
        if not behind:
            return
    raise AssertionError(f"survivors must go on: {behind}")
