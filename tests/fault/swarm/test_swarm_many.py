"""Sixteen, and sixty-four, peers over real sockets, in groups.

Each peer has an identity, a libp2p daemon, a place in the hash table and TCP ports of its own;
eight or sixteen share a process, as 64 interpreters are more than a small machine has room for.
Runs on request: `pytest -m matrix tests/fault/swarm/test_swarm_many.py -s`. Starting 64 peers takes
two cores some minutes, in which they are not good for much else.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1200)]
SETTINGS = {
    "run": "many", "elements": [500, 401], "local_steps": 8, "expiry_s": 60.0,
    "connect_s": 20.0, "stall_s": 15.0, "round_floor_s": 15.0,
}  # fmt: skip
START_S, TRAIN_STEPS = 600.0, 53
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process:
    """A process with several peers, and what it has said."""

    def __init__(self, **settings: Any) -> None:
        script = ROOT / "tests" / "support" / "swarm_many.py"
        command = [sys.executable, str(script), json.dumps({**SETTINGS, **settings})]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [said for said in list(self.said) if said["kind"] == kind]

    def wait_ready(self, until_s: float) -> str:
        while not self.of("ready"):
            assert self.process.poll() is None
            assert time.monotonic() < until_s, self.said[-3:]
            time.sleep(0.2)
        return str(self.of("ready")[0]["address"])

    def cpu_s(self) -> float:
        """Return the processor time that the process and its peers' daemons have taken."""
        pids = [self.process.pid, *self.of("ready")[0]["daemons"]]
        fields = (Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids)
        return sum(int(one[11]) + int(one[12]) for one in fields) / TICKS_PER_S

    def end(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        with self.process.stdin, self.process.stderr as stderr:
            self.process.stdin.close()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
            return stderr.read()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.end()


def why(reason: str) -> str:
    """Return a round's reason without what differs from round to round."""
    return re.sub(r"[0-9.]+ times", "N times", re.sub(r"\b[0-9A-Za-z]{8}\b", "PEER", reason))


def counted(first: dict[str, Any], last: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return what a peer did between two of its states, for each of its rounds."""
    names = ("streams opened", "beats", "questions about records")
    return {name: (last.get(name, 0) - first.get(name, 0)) / max(1, rounds) for name in names}


# Two cores have 125 ms a second for each of 16 peers and 31 ms for each of 64, whose rounds come
# four times as seldom: what is tested is the protocol, and not a crowded machine.
@pytest.mark.parametrize(
    ("peers", "share", "group_size", "step_s"), [(16, 2, 8, 1.5), (64, 4, 8, 6.0)]
)
def test_many_peers_average_in_groups(
    processes: list[Process], peers: int, share: int, group_size: int, step_s: float
) -> None:
    begun_s = time.monotonic()
    until_s = begun_s + START_S
    each: dict[str, Any] = {"peers": peers // share, "group_size": group_size, "step_s": step_s}
    processes.append(Process(first=0, **each))
    address = processes[0].wait_ready(until_s)
    for index in range(1, share):  # all at once
        processes.append(Process(first=index * each["peers"], through=address, **each))
    for process in processes:
        process.wait_ready(until_s)
    started_s = time.monotonic() - begun_s
    began = [len(process.said) for process in processes]
    cpu_s = sum(process.cpu_s() for process in processes)
    train_s = TRAIN_STEPS * step_s
    time.sleep(train_s)
    cpu_s = sum(process.cpu_s() for process in processes) - cpu_s
    news = [said for process, n in zip(processes, began, strict=True) for said in process.said[n:]]
    states = [said for said in news if said["kind"] == "state"]
    last = {said["number"]: said for said in states}
    first = {said["number"]: said for said in reversed(states)}
    rounds = [said for said in news if said["kind"] == "round"]
    together = [said for said in rounds if said["members"] > 1]
    taken = Counter(said["number"] for said in together)
    traffic = [counted(first[number], last[number], taken[number]) for number in last]
    spread = statistics.mean(
        statistics.pstdev(values)
        for values in zip(*(said["shown"] for said in last.values()), strict=True)
    )
    figures = {
        "peers": len(last),
        "started_s": started_s,
        "retries": sum(len(process.of("retry")) for process in processes),
        "seen": min(said["seen"] for said in last.values()),
        "rounds of a peer": len(together) / peers,
        "members": statistics.mean(said["members"] for said in together),
        "most members": max(said["members"] for said in together),
        "complete": sum(r["outcome"] == "averaged" for r in together) / max(1, len(together)),
        "abandoned": sum(said["outcome"] == "abandoned" for said in rounds) / len(rounds),
        "fetched": sum(said["outcome"] == "fetched" for said in rounds),
        "reasons": Counter(why(said["reason"]) for said in rounds if said["reason"]),
        "bytes sent in a round": statistics.mean(said["sent"] for said in together),
        **{f"{name} a round": statistics.mean(one[name] for one in traffic) for name in traffic[0]},
        "cpu_ms a round": 1000 * cpu_s / sum(taken.values()),
        "cpu_s of a peer a minute": 60 * cpu_s / train_s / peers,
        "round_s": statistics.median(said["duration_s"] for said in together),
        "spread": spread,
    }
    print(json.dumps(figures, indent=1))
    assert len(last) == peers
    assert figures["seen"] == peers
    assert figures["most members"] <= group_size
    assert set(taken) == set(range(peers))
    assert figures["members"] > group_size / 2
    assert figures["complete"] > 0.9
    assert figures["abandoned"] < 0.05
    # By themselves they would go to targets that are 1.0 apart, and nearly reach them.
    assert spread < 1 / 3
    for process in processes:
        assert "Traceback" not in process.end()
