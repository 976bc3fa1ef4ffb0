"""Several peers in one process, each with sockets, daemon and identity of its own.

Reads its settings as one JSON object from the command line; writes one JSON object a line: `ready`
when all take part, `state` for each peer every few seconds, `round` for each round of a peer. Ends
on end of file on standard input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from atomtrain.errors import SwarmError
from atomtrain.swarm import Manifest, Swarm, SwarmConfig

_PRINTING = threading.Lock()


class Vector:
    """One tensor for each fragment; a step moves them towards the peer's own target."""

    def __init__(self, elements: tuple[int, ...]) -> None:
        self.fragments = [torch.zeros(n) for n in elements]

    @contextlib.contextmanager
    def view(self, index: int) -> Iterator[torch.Tensor]:
        yield self.fragments[index]

    def step(self, target: float) -> None:
        for fragment in self.fragments:
            fragment.lerp_(torch.tensor(target), 0.05)


def say(kind: str, **fields: Any) -> None:
    with _PRINTING:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def config_of(settings: dict[str, Any], join: list[str]) -> SwarmConfig:
    return SwarmConfig(
        run=settings["run"],
        listen_host=settings["host"],
        join=tuple(join),
        discoverable=False,
        local_steps_per_round=settings["local_steps"],
        group_size=settings["group_size"],
        wire=settings.get("wire", "float16"),
        direct=settings.get("direct", True),
        expiry_s=30.0,
        connect_s=20.0,
        round_floor_s=15.0,
    )


def enter(settings: dict[str, Any], number: int, address: str) -> tuple[Swarm, Vector]:
    """Found the run where there is no address yet; else join, as often as it takes."""
    elements = tuple(settings["elements"])
    vector = Vector(elements)
    if not address:
        config = config_of(settings, [])
        return Swarm.found(config, Manifest(config.run, elements), vector), vector
    for attempt in range(5):
        try:
            swarm = Swarm.join(config_of(settings, [address]))
        except SwarmError as error:  # the machine is busy with the others' starting
            say("retry", number=number, attempt=attempt, text=str(error))
            time.sleep(2.0)
            continue
        swarm.download(vector)
        return swarm, vector
    raise SystemExit(f"peer {number} cannot join")


def train(
    swarm: Swarm, vector: Vector, number: int, settings: dict[str, Any], ended: threading.Event
) -> None:
    step_s, said_s = settings["step_s"], 0.0
    while not ended.wait(step_s):
        vector.step(float(number))
        reports = swarm.boundary(
            steps=1, tokens=100, tokens_per_s=100 / step_s, step_s=step_s, access=vector
        )
        for report in reports:
            say("round", number=number, round=report.round, outcome=report.outcome,
                members=len(report.contributors), sent=report.bytes_sent, reason=report.reason,
                duration_s=report.duration_s)  # fmt: skip
        if time.monotonic() - said_s > 2.0:
            said_s = time.monotonic()
            mean = sum(float(f.mean()) for f in vector.fragments) / len(vector.fragments)
            versions = [s.version for s in swarm._desk.store.stamps() if s is not None]
            say("state", number=number, mean=mean, versions=versions, seen=len(swarm.peers()))


def main() -> None:
    settings = json.loads(sys.argv[1])
    logging.basicConfig(level=settings.get("log", "ERROR"))
    torch.set_num_threads(1)
    ended = threading.Event()
    address, swarms, threads = settings.get("join", ""), [], []
    for number in range(settings["first"], settings["first"] + settings["peers"]):
        swarm, vector = enter(settings, number, address)
        address = address or swarm.address
        swarms.append(swarm)
        arguments = (swarm, vector, number, settings, ended)
        threads.append(threading.Thread(target=train, args=arguments, daemon=True))
        threads[-1].start()
    say("ready", address=address)
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
