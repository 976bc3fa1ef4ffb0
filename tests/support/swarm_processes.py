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

from atombench import forks
from atombench.links.shaping import Network
from tests.support.waiting import PATIENCE_S, wait_until

Said = dict[str, Any]


class PeerProcess:
    """A peer that runs `swarm_peer.py`."""

    def __init__(self, *, within: Sequence[str] = (), **settings: Any) -> None:
        """`within`: what comes before the command, such as what enters a network namespace."""
        script = Path(__file__).with_name("swarm_peer.py")
        told = json.dumps({"run": "fault", **settings})
        start = subprocess.Popen if within else forks.Popen
        self._process = start(
            [*within, sys.executable, str(script), told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: list[Said] = []
        self._ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(
        self, kind: str, where: Callable[[Said], bool] = lambda _: True, after: int = 0
    ) -> Said:
        """Return the first such line at or after index `after`; fails the test if none comes."""
        until_s = time.monotonic() + PATIENCE_S
        index = after
        with self._news:
            while True:
                while index < len(self._said):
                    said = self._said[index]
                    index += 1
                    if said["kind"] == kind and where(said):
                        return said
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"no such {kind!r}; last: {self._said[-3:]}"
                assert not self._ended, f"no such {kind!r} before its end; last: {self._said[-3:]}"
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

    def state(self) -> str:
        """Return what the kernel says of the process: R, S, T (stopped), Z (dead), or X: gone."""
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return "X"
        return told.rsplit(")", 1)[1].split()[0]

    @property
    def resident_bytes(self) -> int:
        """Memory of the process now."""
        return self._memory("VmRSS")

    @property
    def most_resident_bytes(self) -> int:
        """The most that the process has had since `forget_peak`."""
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def _memory(self, key: str) -> int:
        told = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in told.splitlines() if key in line)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(PATIENCE_S)

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
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(PATIENCE_S)
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
        with self._news:
            self._ended = True
            self._news.notify_all()


def in_network(network: Network, host: int, join: Sequence[str], **settings: Any) -> PeerProcess:
    """Start a peer on a host of a network; it joins what is at these addresses."""
    return PeerProcess(
        within=network.entering(host), host=network.address(host), join=list(join), **settings
    )


def wait_averaged(seen_by: PeerProcess, *members: PeerProcess) -> Said:
    """Wait until a peer tells of a new round of exactly these; return what it tells."""
    wanted = {member.peer_id for member in members}
    return seen_by.wait_for("round", lambda said: set(said["contributors"]) == wanted, seen_by.now)


def wait_same_anchors(*members: PeerProcess) -> None:
    """Wait until these have told, since now, of one anchor of each fragment, bit for bit.

    Of equal versions alone nothing follows: a peer that was not seen for a moment may have gone on
    by itself, until it finds that the others' anchors beat its own.
    """
    begun = {member: member.now for member in members}

    def same() -> bool:
        told = [
            [
                set(of)
                for of in zip(*(s["digests"] for s in member.lines("state", now)), strict=True)
            ]
            for member, now in begun.items()
        ]
        return all(told) and all(set.intersection(*of) for of in zip(*told, strict=True))

    wait_until(same, lambda: [member.lines("state")[-1:] for member in members])


def is_running(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    """Wait until a process whose peer is dead has ended, too."""
    wait_until(lambda: not is_running(pid), lambda: f"process {pid} survived its peer")
