"""Real `atom train` processes that a benchmark starts, follows by their events, and kills.

No process outlives the crowd: each peer leads a process group, is killed by the kernel if the
benchmark itself dies, and carries a mark in its environment by which what might be left is found.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from atomtrain.events import Event, EventTail

_MARK = "ATOM_CHURN_MARK"
_STUB = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it outlasts execv
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_LOG_LINES = 5
_DEATH_S = 300.0
"""How long a killed process may take to be gone."""
_NOTES = "rounds.jsonl"


def until_this_ends(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command that the kernel kills if this process dies."""
    stub = [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid())]
    return subprocess.Popen([*stub, *command], **options)


class ChurnPeer:
    """One peer: its process, its events so far, and when it was started and ended (Unix time)."""

    def __init__(self, name: str, folder: Path, process: subprocess.Popen[bytes]) -> None:
        """Follow a process that was just started."""
        self.name, self.folder = name, folder
        self.process = process
        self.started_s = time.time()
        self.ended_s: float | None = None
        """When it was killed, or asked to end."""
        self.killed = False
        self.events: list[Event] = []
        self._tail = EventTail(folder / "events.jsonl")
        self._read_to_its_end = False

    def read(self) -> None:
        """Take in the events that were added."""
        if not self._read_to_its_end:
            ended = not self.running
            self.events += self._tail.read()
            self._read_to_its_end = ended  # before the last look: nothing comes after it

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind, oldest first."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def training(self) -> bool:
        """Whether it runs and has finished a step."""
        return self.running and any(event["event"] == "step" for event in self.events)

    @property
    def averages(self) -> bool:
        """Whether it runs and has averaged with others."""
        return self.running and self.first_average_s is not None

    @property
    def first_average_s(self) -> float | None:
        """When it had averaged with others for the first time; Unix time."""
        return next((e["time_s"] for e in self.events if is_average(e)), None)

    @property
    def address(self) -> str:
        """What others give to `--join`, once it has started."""
        return str(self.of("run_started")[-1]["join_address"])

    @property
    def notes(self) -> Path:
        """What the witness noted of its rounds."""
        return self.folder / _NOTES

    @property
    def peer_id(self) -> str:
        """Its identity in the swarm, once it has started."""
        return self.address.rpartition("/")[2]

    def last_words(self) -> str:
        """Return the end of its output."""
        lines = (self.folder / "peer.log").read_text(encoding="utf-8", errors="replace")
        return " / ".join(lines.splitlines()[-_LOG_LINES:])


def is_average(event: Event) -> bool:
    """Say whether an event is the end of a round in which several peers averaged."""
    return (
        event["event"] == "round"
        and event["outcome"] in ("averaged", "partial")
        and event["contributors"] > 1
    )


class Crowd:
    """All peers of a benchmark, dead ones included; a context that leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        run: str,
        arguments: Sequence[str],
        witness: bool = False,
        popen: Callable[..., subprocess.Popen[bytes]] = until_this_ends,
    ) -> None:
        """Give `arguments` to every peer's `atom train`; all files go below `folder`.

        With `witness`, each peer's rounds are noted in `ChurnPeer.notes`. `popen` starts a command
        like `subprocess.Popen`, as a process that does not outlive this one.
        """
        self.peers: list[ChurnPeer] = []
        self._folder, self._run, self._arguments = folder, run, arguments
        self._witness, self._popen = witness, popen
        self._mark = secrets.token_hex(16)
        self.longest_lag_s = 0.0
        """By how much this process, which only sleeps and reads, was late at most: a machine that
        stands still, or has no processor left, holds up peers alike."""

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*(p.process.pid for p in self.peers if p.running), *self.left_over()]:
            _kill(pid)
        for peer in self.peers:
            peer.process.wait(_DEATH_S)

    def start(self, join: str | None = None) -> ChurnPeer:
        """Start one more peer; it founds the run, or joins at an address."""
        name = f"peer-{len(self.peers)}"
        runs = self._folder / "runs"
        place = ["--run", self._run] if join is None else ["--join", join]
        folder = runs / self._run / name
        program = ["atomtrain.cli.main"]
        if self._witness:
            program = ["atombench.churn.witness", str(folder / _NOTES)]
        command = [
            *(sys.executable, "-m", *program, "train", "--plain", "--threads", "1"),
            *("--host", "127.0.0.1", "--directory", str(runs), "--name", name),
            *(*place, *self._arguments),
        ]
        folder.mkdir(parents=True)
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            _MARK: self._mark,
        }
        with (folder / "peer.log").open("wb") as log:
            process = self._popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )
        self.peers.append(ChurnPeer(name, folder, process))
        return self.peers[-1]

    def kill(self, *peers: ChurnPeer) -> None:
        """Kill peers at once, only their own processes: what they started must end by itself."""
        for peer in peers:
            peer.killed, peer.ended_s = True, time.time()
            peer.process.send_signal(signal.SIGKILL)
        for peer in peers:
            peer.process.wait(_DEATH_S)
            peer.read()

    def running(self) -> list[ChurnPeer]:
        """Return the peers that have not ended."""
        return [peer for peer in self.peers if peer.running]

    def read(self) -> None:
        """Take in the news of all peers."""
        for peer in self.peers:
            peer.read()

    def wait(self, condition: Callable[[], bool], within_s: float, poll_s: float = 0.1) -> bool:
        """Read events until `condition` holds; return whether it did before the deadline."""
        until_s = time.monotonic() + within_s
        while True:
            self.read()
            if condition():
                return True
            if time.monotonic() > until_s:
                return False
            slept_s = time.monotonic()
            time.sleep(poll_s)
            self.longest_lag_s = max(self.longest_lag_s, time.monotonic() - slept_s - poll_s)

    def interrupt(self, within_s: float) -> list[ChurnPeer]:
        """Ask all peers to save and leave; return those that did."""
        asked = self.running()
        for peer in asked:
            peer.ended_s = time.time()
            os.kill(peer.process.pid, signal.SIGINT)
        self.wait(lambda: not any(peer.running for peer in asked), within_s)
        return [peer for peer in asked if peer.process.poll() == 128 + signal.SIGINT]

    def left_over(self) -> list[int]:
        """Return the ids of processes that dead peers left running."""
        known = {peer.process.pid for peer in self.peers}
        return [
            pid for pid in _marked(self._mark) if pid not in known and _parent(pid) not in known
        ]


def _marked(mark: str) -> Iterable[int]:
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it ended meanwhile, or is another user's
                continue
            if wanted in environment.split(b"\0"):
                yield int(entry.name)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
