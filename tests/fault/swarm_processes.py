"""Starts, watches and kills peers that are processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forks

from atomtrain.benchmarks.shaping import Network

Said = dict[str, Any]


class PeerProcess:
    """A peer that runs `swarm_peer.py`."""

    def __init__(self, *, within: Sequence[str] = (), **settings: Any) -> None:
        """`within`: what comes before the command, such as what enters a network namespace."""
        script = Path(__file__).with_name("swarm_peer.py")
        told = json.dumps({"run": "fault", "run_s": 900, **settings})
        start = subprocess.Popen if within else forks.Popen
        self._process = start(
            [*within, sys.executable, str(script), told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: list[Said] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(
        self, kind: str, within_s: float = 120.0, where: Callable[[Said], bool] = lambda _: True,
        after: int = 0,
    ) -> Said:  # fmt: skip
        """Return the first such line at or after index `after`; fails the test if none comes."""
        until_s = time.monotonic() + within_s
        index = after
        with self._news:
            while True:
                while index < len(self._said):
                    said = self._said[index]
                    index += 1
                    if said["kind"] == kind and where(said):
                        return said
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"no such {kind!r} within {within_s} s; last: {self._said[-3:]}"
                self._news.wait(left_s)

    @property
    def now(self) -> int:
        """Index after the last line said so far."""
        with self._news:
            return len(self._said)

    def lines(self, kind: str, after: int = 0) -> list[Said]:
        with self._news:
            return [said for said in self._said[after:] if said["kind"] == kind]

    def wait_ready(self) -> str:
        """Return the address, once the peer trains."""
        ready = self.wait_for("ready")
        self.peer_id, self.daemon = ready["peer_id"], ready["daemon"]
        return str(ready["address"])

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(60)

    def end(self) -> None:
        """Have the peer leave, and do not wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def finish(self) -> str:
        """Have the peer leave, and return what it wrote to standard error."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(60)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout, self._process.stderr as stderr:
            return stderr.read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._said.append(json.loads(line))
                self._news.notify_all()


def in_network(network: Network, host: int, join: Sequence[str], **settings: Any) -> PeerProcess:
    """Start a peer on a host of a network; it joins what is at these addresses."""
    return PeerProcess(
        within=network.entering(host), host=network.address(host), join=list(join), **settings
    )


def wait_averaged(seen_by: PeerProcess, *members: PeerProcess, within_s: float = 120.0) -> Said:
    """Wait until a peer tells of a new round of exactly these; return what it tells."""
    wanted = {member.peer_id for member in members}
    return seen_by.wait_for(
        "round", within_s, lambda said: set(said["contributors"]) == wanted, seen_by.now
    )


def wait_same_anchors(*members: PeerProcess, within_s: float = 120.0) -> None:
    """Wait until these have told, since now, of one anchor of each fragment, bit for bit.

    Of equal versions alone nothing follows: a peer that was not seen for a moment may have gone on
    by itself, until it finds that the others' anchors beat its own.
    """
    until_s = time.monotonic() + within_s
    begun = {member: member.now for member in members}
    while True:
        told = [
            [
                set(of)
                for of in zip(*(s["digests"] for s in member.lines("state", now)), strict=True)
            ]
            for member, now in begun.items()
        ]
        if all(told) and all(set.intersection(*of) for of in zip(*told, strict=True)):
            return
        assert time.monotonic() < until_s, [member.lines("state")[-1:] for member in members]
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int, within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while is_running(pid):
        assert time.monotonic() < until_s, f"process {pid} survived its peer"
        time.sleep(0.05)
