"""A peer's process for `atom bench network` and `join`: does what it is told.

It is told `{"do": NAME, ...}`, one JSON object a line, on standard input and answers
`{"ok": {...}}` or `{"error": "..."}` on standard output. When standard input ends, so does the
process, whatever it is doing: no peer outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from atombench.links.peers import Reply


class Method(Protocol):
    """One of the ways of training."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Return what it can be told, by name."""
        ...


def serve(method: Method, commands: TextIO, replies: TextIO) -> None:
    """Do what is told until there is nothing more."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in commands:
            told.put(line)
        if os.getpgid(0) == os.getpid():  # with whatever it has started
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    while True:
        answer(method, told.get(), replies)


def answer(method: Method, line: str, replies: TextIO) -> None:
    """Do what one line tells, and say what came of it."""
    request = json.loads(line)
    name = request.pop("do")
    try:
        reply: Reply = {"ok": method.commands()[name](**request)}
    except Exception as error:  # noqa: BLE001 - told to the benchmark, which names the peer
        reply = {"error": f"{name}: {type(error).__name__}: {error}".replace("\n", " ")[:2000]}
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def main() -> None:
    """`METHOD CORE`: bind to one core (-1: none) and serve."""
    kind, core = sys.argv[1], int(sys.argv[2])
    if core >= 0:
        os.sched_setaffinity(0, {core})
    # Whatever libraries print goes to standard error; replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Children that libraries fork close standard input; that of the commands is being read from.
    commands, sys.stdin = sys.stdin, open(os.devnull, encoding="utf-8")  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    method: Method
    if kind == "atom":
        from atombench.network.atom_peer import AtomPeer

        method = AtomPeer()
    elif kind in ("averaging", "hivemind"):
        from atombench.averaging.peers import AveragingPeer, HivemindPeer

        method = AveragingPeer() if kind == "averaging" else HivemindPeer()
    elif kind == "join":
        from atombench.swarm.peers import JoinPeer

        method = JoinPeer()
    elif kind == "relay":
        from atombench.swarm.peers import RelayPeer

        method = RelayPeer()
    else:
        from atombench.network.gloo_peer import GlooPeer

        method = GlooPeer()
    serve(method, commands, replies)


if __name__ == "__main__":
    main()
