"""Several peers in one process, each with sockets, daemon and identity of its own.

Reads its settings as one JSON object from the command line; writes one JSON object a line: `ready`
when all take part, `round` for each round of a peer, `state` for each peer every few seconds, with
what it has sent, opened and asked for so far. Ends on end of file on standard input.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm import Swarm
from tests.support.swarm_vectors import Vectors, config_of, cross, daemon_pid, found, say

_TRIES = 5
_TELL_S = 2.0
_SHOWN = 20
"""Parameters of each fragment that a state tells."""


def targets_of(number: int, elements: tuple[int, ...]) -> list[torch.Tensor]:
    """Return where a peer is drawn: each one elsewhere, and all alike far from the middle.

    Numbers in place of vectors would make peers in the middle learn nearly nothing, by which the
    guards take all others for broken.
    """
    chance = torch.Generator().manual_seed(number)
    return [torch.randn(n, generator=chance) for n in elements]


class Traffic:
    """What one peer has done on the network, counted where it does it."""

    def __init__(self, swarm: Swarm) -> None:
        self.counts = Counter[str]()
        context = swarm._service.context
        self._count(context.transport, "open", "streams opened")
        self._count(context.directory, "records", "beats")
        protocol = context.directory._node.protocol
        for name in ("call_find", "call_store", "call_ping"):
            self._count(protocol, name, "questions about records")

    def _count(self, owner: Any, name: str, what: str) -> None:
        right = getattr(owner, name)

        async def counted(*args: Any, **more: Any) -> Any:
            self.counts[what] += 1
            return await right(*args, **more)

        setattr(owner, name, counted)


def enter(settings: dict[str, Any], number: int, address: str) -> tuple[Swarm, Vectors]:
    """Found the run where there is no address yet; else join, as often as it takes."""
    if not address:
        return found(settings)
    for attempt in range(_TRIES):
        try:
            swarm = Swarm.join(config_of({**settings, "join": [address]}))
        except SwarmError as error:  # the machine is busy with the others' starting
            say("retry", number=number, attempt=attempt, text=str(error))
            time.sleep(2.0)
            continue
        vectors = Vectors(swarm.manifest.fragment_elements)
        swarm.download(vectors)
        return swarm, vectors
    raise SystemExit(f"peer {number} cannot join")


def train(
    swarm: Swarm, vectors: Vectors, number: int, settings: dict[str, Any], ended: threading.Event
) -> None:
    step_s, said_s, traffic = settings["step_s"], 0.0, Traffic(swarm)
    targets = targets_of(number, swarm.manifest.fragment_elements)
    while not ended.wait(step_s):
        vectors.step_to(targets)
        for report in cross(swarm, vectors, step_s):
            say("round", number=number, round=report.round, outcome=report.outcome,
                members=len(report.contributors), sent=report.bytes_sent, reason=report.reason,
                duration_s=report.duration_s)  # fmt: skip
        if time.monotonic() - said_s > _TELL_S:
            said_s = time.monotonic()
            shown = [value for f in vectors.fragments for value in f[:_SHOWN].tolist()]
            say("state", number=number, shown=shown, seen=len(swarm.peers()), **traffic.counts)


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=settings.get("log", "ERROR"))
    torch.set_num_threads(1)
    ended = threading.Event()
    address, swarms, threads = settings.get("through", ""), [], []
    for number in range(settings["first"], settings["first"] + settings["peers"]):
        swarm, vectors = enter(settings, number, address)
        say("entered", number=number, at_s=time.monotonic())
        address = address or swarm.address
        swarms.append(swarm)
        arguments = (swarm, vectors, number, settings, ended)
        threads.append(threading.Thread(target=train, args=arguments, daemon=True))
        threads[-1].start()
    say("ready", address=address, daemons=[daemon_pid(swarm) for swarm in swarms])
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join(10)
    leaving = [threading.Thread(target=swarm.leave, args=(2.0,)) for swarm in swarms]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(20)


if __name__ == "__main__":
    main()
