"""Starts several peers on this machine, shows their events together, and sees them off.

Each peer leads a process group of its own, in the launcher's session. The terminal sends Ctrl-C
to the foreground group only, so a peer gets each signal from the launcher once and never from the
terminal as well; and a peer's helper processes share its group, so that what a killed peer leaves
behind can be ended. Peers write to files, not to pipes, and do not watch their parent: if the
launcher is killed they go on, as the ordinary peers they are.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from atomtrain.errors import ConfigError, SwarmError
from atomtrain.events import Event, EventTail
from atomtrain.units import format_seconds
from atomtrain.views.runs.event_text import join_address

if TYPE_CHECKING:
    from atomtrain.views.runs.display import Display

LOG_LINES = 15
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows, where either kills
STAGE_SIGNALS = (0, signal.SIGINT, signal.SIGTERM, _KILL)
"""What peers get in each stage of their end: run on, save and leave, leave at once, be killed."""
STAGE_NOTES = (
    "",
    "peers were asked to save and leave; Ctrl-C again ends them without saving",
    "peers were told to end at once; Ctrl-C again kills them",
    "peers that were left are killed",
)


@dataclass(frozen=True, kw_only=True)
class PeerCommand:
    """How one peer is started and where it writes."""

    name: str
    """The peer's name in the display; no two peers of a launch share one."""

    argv: Callable[[str | None], Sequence[str]]
    """Gives the command line. Called with `None` for the first peer, and with the first peer's
    join address for every other one."""

    events: Path
    """The event file that the peer writes. What it holds before the launch is not shown."""

    log: Path
    """Receives the peer's standard output and error, appended; created with its folder."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How long the launcher waits for what. All in seconds, above 0."""

    join_timeout_s: float = 300.0
    """From the start of the first peer until it has told its join address."""

    save_timeout_s: float = 600.0
    """From the first Ctrl-C until all peers have saved and left; then they are terminated."""

    terminate_timeout_s: float = 10.0
    """From SIGTERM until peers that are still there are killed."""

    poll_s: float = 0.1
    """Between two looks at the peers and their event files."""

    def __post_init__(self) -> None:
        for name, value_s in vars(self).items():
            if not value_s > 0:
                raise ConfigError(f"launch: {name} {value_s} must be above 0 seconds, such as 10")


def launch_peers(
    commands: Sequence[PeerCommand], display: Display, config: LaunchConfig | None = None
) -> int:
    """Run peers until the last one has ended; blocks, and leaves no process behind.

    The first command is started at once, the others as soon as the first peer has told its join
    address (`run_started.join_address`, or `listening.address`). A peer that dies is shown as lost
    (event `peer_lost`) and the others go on. The first SIGINT, SIGTERM or SIGHUP is passed on to
    every peer as SIGINT, so that each can save and leave; a second SIGINT sends them SIGTERM, and
    a third one, or a deadline, SIGKILL. Signals are handled only if called on the main thread.

    Returns:
        0 if at least one peer ended with exit code 0; else the exit code of the peer that failed
        first (128 + n if signal n killed it), whose last lines of output go into the summary.

    Raises:
        ConfigError: no command, a name used twice, or a command that cannot be started.
        SwarmError: the first peer did not tell its join address in time.
    """
    names = [command.name for command in commands]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"peer names {names} cannot be launched; give at least one peer, each with its own name"
        )
    launch = _Launch(commands, display, config or LaunchConfig())
    with _passing_on_signals(launch):
        try:
            launch.run()
        finally:
            launch.end_all()
    return launch.exit_code()


@dataclass(eq=False)
class _Peer:
    """A started peer; `exit_code` is `None` until it has ended and was reaped."""

    command: PeerCommand
    process: subprocess.Popen[bytes]
    tail: EventTail
    exit_code: int | None = None

    def send(self, number: int) -> None:
        """Signal the peer if it has not ended; SIGKILL goes to its helper processes as well.

        Its process id stays its own until it is reaped, so that nobody else can be hit.
        """
        if self.exit_code is None:
            send = os.killpg if number == _KILL else os.kill
            send(self.process.pid, number)

    def reap(self) -> bool:
        """Return whether the peer has just ended; if so, also end the helpers it left behind."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.exit_code is not None or os.waitid(os.P_PID, self.process.pid, flags) is None:
            return False
        os.killpg(self.process.pid, signal.SIGTERM)  # the ended peer itself is past signals
        code = self.process.wait()
        self.exit_code = code if code >= 0 else 128 - code
        return True


@dataclass(eq=False)
class _Launch:
    """The peers of one launch, and how far their end has come."""

    commands: Sequence[PeerCommand]
    display: Display
    config: LaunchConfig
    peers: list[_Peer] = field(default_factory=list)
    ended: list[_Peer] = field(default_factory=list)
    address: str | None = None
    interrupts: int = 0
    """How many stages towards the end the user has asked for; set by the signal handler."""
    stage: int = 0
    """How far the end has come: an index into `STAGE_SIGNALS`."""
    stage_ends_s: float = math.inf
    """When peers that are still there get the signal of the next stage; monotonic."""

    def run(self) -> None:
        """Start the peers and follow them until all have ended."""
        self._start(self.commands[0], None)
        join_by_s = time.monotonic() + self.config.join_timeout_s
        waiting = list(self.commands[1:])
        while self._step():
            if not waiting or self.interrupts:
                continue
            if self.address is not None:
                for command in waiting:
                    self._start(command, self.address)
                waiting.clear()
            elif time.monotonic() > join_by_s:
                self._enter(2)  # it has nothing to save
                raise SwarmError(
                    f"peer {self.commands[0].name!r} told no join address within "
                    f"{format_seconds(self.config.join_timeout_s)}; see {self.commands[0].log}, "
                    "or allow it more time"
                )
        if waiting and not self.interrupts:
            first = self.commands[0].name
            self.display.note(f"{len(waiting)} peers not started: {first} ended before they could")

    def end_all(self) -> None:
        """See off what is still running after an error; nothing to do after an orderly end."""
        while any(peer.exit_code is None and not peer.reap() for peer in self.peers):
            if self.stage == 0:
                self._enter(1)
            self._press_on()
            time.sleep(self.config.poll_s)

    def exit_code(self) -> int:
        """Return what the launch as a whole came to; name the first failure if no peer made it."""
        if any(peer.exit_code == 0 for peer in self.peers):
            return 0
        failed = self.ended[0]
        if not self._left_as_asked(failed):
            lines = [f"last lines of {failed.command.log}:", *_last_lines(failed.command.log)]
            self.display.conclude(*lines)
        return failed.exit_code or 0

    def _step(self) -> bool:
        """Take in what happened since the last step; return whether a peer is still running."""
        ended = [peer for peer in self.peers if peer.reap()]
        for peer in self.peers:
            if peer.exit_code is None or peer in ended:  # an ended peer is read to its last event
                self._show_events(peer)
        for peer in ended:
            self._show_end(peer)
        if len(self.ended) == len(self.peers):
            return False
        stage = self.stage
        self._press_on()
        if self.stage != stage:
            self.display.note(STAGE_NOTES[self.stage])
        time.sleep(self.config.poll_s)
        return True

    def _start(self, command: PeerCommand, address: str | None) -> None:
        argv = list(command.argv(address))
        tail = EventTail(command.events, from_end=True)
        try:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with command.log.open("ab") as log:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        except OSError as error:
            raise ConfigError(
                f"peer {command.name!r} cannot be started with {argv[:4]}...: {error}; "
                "check the command and the folder for its output"
            ) from error
        self.peers.append(_Peer(command, process, tail))

    def _show_events(self, peer: _Peer) -> None:
        for event in peer.tail.read():
            if self.address is None and peer is self.peers[0]:
                self.address = join_address(event)
            self.display.update(peer.command.name, event)

    def _show_end(self, peer: _Peer) -> None:
        self.ended.append(peer)
        if peer.exit_code == 0 or self._left_as_asked(peer):
            return
        event: Event = {
            "time_s": time.time(),
            "event": "peer_lost",
            "reason": _reason(peer.exit_code or 0),
            "log": str(peer.command.log),
        }
        self.display.update(peer.command.name, event)

    def _left_as_asked(self, peer: _Peer) -> bool:
        return self.interrupts > 0 and peer.exit_code == 128 + signal.SIGINT

    def _press_on(self) -> None:
        """Go to the stage that the user asked for, or that a deadline calls for."""
        wanted = min(self.interrupts, len(STAGE_SIGNALS) - 1)
        if self.stage < wanted or time.monotonic() > self.stage_ends_s:
            self._enter(self.stage + 1)

    def _enter(self, stage: int) -> None:
        """Send the signal of a stage to all peers that are left, and set its deadline."""
        waits_s = (math.inf, self.config.save_timeout_s, self.config.terminate_timeout_s, math.inf)
        self.stage, self.stage_ends_s = stage, time.monotonic() + waits_s[stage]
        for peer in self.peers:
            peer.send(STAGE_SIGNALS[stage])


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return [line.rstrip() for line in deque(lines, maxlen=LOG_LINES)]
    except OSError as error:
        return [f"(cannot be read: {error})"]


def _reason(exit_code: int) -> str:
    if exit_code <= 128:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(exit_code - 128).name}"
    except ValueError:
        return f"exit code {exit_code}"


@contextmanager
def _passing_on_signals(launch: _Launch) -> Iterator[None]:
    """Count interrupts in `launch` instead of dying of them; a signal that is ignored stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def count(number: int, _frame: FrameType | None) -> None:
        # Closing a terminal can send SIGHUP twice: only Ctrl-C asks more than once.
        launch.interrupts = (
            launch.interrupts + 1 if number == signal.SIGINT else max(launch.interrupts, 1)
        )

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, count)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
