"""Launching peers: real processes, real signals, real `kill -9`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import ConfigError, SwarmError
from atomtrain.training.launcher import LaunchConfig, PeerCommand, launch_peers
from tests.support import ROOT
from tests.support.launch_fake_peers import FAKE_PEER, command
from tests.support.waiting import PATIENCE_S, wait_until

LAUNCHER = ROOT / "tests" / "support" / "launch_fake_peers.py"
FAST = LaunchConfig(
    join_timeout_s=PATIENCE_S,
    save_timeout_s=PATIENCE_S,
    terminate_timeout_s=PATIENCE_S,
    poll_s=0.02,
)
FOREVER = ("--steps", "100000")

Event = dict[str, Any]


class Recorder:
    """Keeps what the launcher tells; `react` is called with each event while peers run."""

    def __init__(self, react: Callable[[str, Event], None] = lambda name, event: None) -> None:
        self.events: list[tuple[str, Event]] = []
        self.notes: list[str] = []
        self.conclusion: list[str] = []
        self.pids: dict[str, int] = {}
        self.react = react

    def update(self, peer_name: str, event: Event) -> None:
        self.events.append((peer_name, event))
        if event["event"] == "run_started":
            self.pids[peer_name] = event["pid"]
        self.react(peer_name, event)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def conclude(self, *lines: str) -> None:
        self.conclusion += lines

    def of(self, peer_name: str, kind: str) -> list[Event]:
        return [
            event for name, event in self.events if name == peer_name and event["event"] == kind
        ]


def exists(pid: int) -> bool:
    """Say whether a process is there, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts on its first call only."""
    left = [action]
    return lambda: left.pop()() if left else None


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Undo an ignored SIGINT, as inherited from a shell that runs tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # put back by the launcher
    signal.signal(signal.SIGINT, before)


def test_others_join_at_the_first_peers_address_and_all_complete(tmp_path: Path) -> None:
    seen = Recorder()
    commands = [command(tmp_path, name) for name in ("a", "b", "c")]
    assert launch_peers(commands, seen, FAST) == 0
    assert [event["joined"] for name in "abc" for event in seen.of(name, "run_started")] == [
        None,
        "/here",
        "/here",
    ]
    for name in "abc":
        assert [event["step"] for event in seen.of(name, "step")] == [1, 2, 3, 4, 5]
        assert [event["reason"] for event in seen.of(name, "run_finished")] == ["completed"]
        assert "output of the peer" in (tmp_path / "logs" / f"{name}.log").read_text()
    assert not any(exists(pid) for pid in seen.pids.values())
    assert seen.conclusion == []


def test_first_peer_killed_is_lost_and_the_other_goes_on(tmp_path: Path) -> None:
    kill_first = once(lambda: os.kill(seen.pids["a"], signal.SIGKILL))
    seen = Recorder(lambda name, event: kill_first() if name == "b" else None)
    commands = [command(tmp_path, "a", *FOREVER, "--helper"), command(tmp_path, "b")]
    assert launch_peers(commands, seen, FAST) == 0
    (lost,) = seen.of("a", "peer_lost")
    assert "SIGKILL" in lost["reason"]
    assert lost["log"].endswith("a.log")
    assert seen.of("b", "run_finished")[0]["reason"] == "completed"
    (started,) = seen.of("a", "run_started")
    helper_pid = started["helper_pid"]
    wait_until(lambda: not exists(helper_pid) or _is_zombie(helper_pid))
    assert not exists(seen.pids["a"])


def _is_zombie(pid: int) -> bool:
    """Say whether a process waits to be reaped by an init that may be slow, or is none of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_if_no_peer_completes_the_first_failure_counts(tmp_path: Path) -> None:
    seen = Recorder()
    commands = [command(tmp_path, "a", "--fail", "3"), command(tmp_path, "b", "--fail", "4")]
    assert launch_peers(commands, seen, FAST) == 3
    assert "exit code 3" in seen.of("a", "peer_lost")[0]["reason"]
    assert seen.conclusion[-1] == "the reason why it failed"


def test_first_peer_that_dies_before_it_can_be_joined_ends_the_launch(tmp_path: Path) -> None:
    seen = Recorder()
    early_end = PeerCommand(
        name="a",
        argv=lambda _: [sys.executable, "-c", "raise SystemExit('port is taken')"],
        events=tmp_path / "a.jsonl",
        log=tmp_path / "a.log",
    )
    assert launch_peers([early_end, command(tmp_path, "b")], seen, FAST) == 1
    assert seen.conclusion[-1] == "port is taken"
    assert "1 peers not started" in seen.notes[-1]
    assert not (tmp_path / "b.jsonl").exists()


def test_one_interrupt_reaches_every_peer_once_and_lets_it_save(tmp_path: Path) -> None:
    interrupt = once(lambda: os.kill(os.getpid(), signal.SIGINT))
    seen = Recorder(
        lambda name, event: interrupt() if name == "b" and event["event"] == "step" else None
    )
    commands = [command(tmp_path, name, *FOREVER) for name in ("a", "b")]
    assert launch_peers(commands, seen, FAST) == 0
    for name in "ab":
        (end,) = seen.of(name, "run_finished")
        assert (end["reason"], end["interrupts"]) == ("interrupted", 1)
        assert seen.of(name, "peer_lost") == []
    assert "save and leave" in seen.notes[0]


def test_termination_of_the_launcher_lets_peers_save(tmp_path: Path) -> None:
    terminate = once(lambda: os.kill(os.getpid(), signal.SIGTERM))
    seen = Recorder(lambda name, event: terminate() if event["event"] == "step" else None)
    assert launch_peers([command(tmp_path, "a", *FOREVER)], seen, FAST) == 0
    assert seen.of("a", "run_finished")[0]["reason"] == "interrupted"


def test_second_interrupt_ends_peers_that_do_not_leave(tmp_path: Path) -> None:
    def react(name: str, event: Event) -> None:
        if event["event"] == "step" and event["step"] in (1, 10):
            os.kill(os.getpid(), signal.SIGINT)

    seen = Recorder(react)
    code = launch_peers([command(tmp_path, "a", *FOREVER, "--on-sigint", "ignore")], seen, FAST)
    assert code == 128 + signal.SIGTERM
    assert not exists(seen.pids["a"])


def test_peer_that_ignores_everything_is_killed_at_the_deadline(tmp_path: Path) -> None:
    interrupt = once(lambda: os.kill(os.getpid(), signal.SIGINT))
    seen = Recorder(lambda name, event: interrupt() if event["event"] == "step" else None)
    hurried = LaunchConfig(save_timeout_s=0.2, terminate_timeout_s=0.2, poll_s=0.02)
    stubborn = command(tmp_path, "a", *FOREVER, "--on-sigint", "ignore", "--on-sigterm", "ignore")
    assert launch_peers([stubborn], seen, hurried) == 128 + signal.SIGKILL
    assert len(seen.notes) == 3
    assert not exists(seen.pids["a"])


def test_first_peer_without_an_address_is_ended_in_time(tmp_path: Path) -> None:
    def argv(_: str | None) -> list[str]:
        return [sys.executable, str(FAKE_PEER), str(tmp_path / "a.jsonl"), *FOREVER]

    mute = PeerCommand(name="a", argv=argv, events=tmp_path / "a.jsonl", log=tmp_path / "a.log")
    seen = Recorder()
    impatient = LaunchConfig(join_timeout_s=1.0, poll_s=0.02)
    with pytest.raises(SwarmError, match=r"'a' told no join address within 1\.00 s"):
        launch_peers([mute, command(tmp_path, "b")], seen, impatient)
    assert not any(exists(pid) for pid in seen.pids.values())
    assert not (tmp_path / "b.jsonl").exists()


def test_command_that_cannot_start_ends_the_peers_before_it(tmp_path: Path) -> None:
    seen = Recorder()
    missing = PeerCommand(
        name="b",
        argv=lambda _: ["/nonexistent/python"],
        events=tmp_path / "b.jsonl",
        log=tmp_path / "b.log",
    )
    with pytest.raises(ConfigError, match="'b' cannot be started"):
        launch_peers([command(tmp_path, "a", *FOREVER), missing], seen, FAST)
    assert not exists(seen.pids["a"])


def test_display_that_fails_leaves_no_peer_behind(tmp_path: Path) -> None:
    def fail(name: str, event: Event) -> None:
        if event["event"] == "step":
            raise RuntimeError("display")

    seen = Recorder(fail)
    with pytest.raises(RuntimeError, match="display"):
        launch_peers([command(tmp_path, "a", *FOREVER)], seen, FAST)
    assert not exists(seen.pids["a"])


def test_events_of_an_earlier_launch_are_neither_shown_nor_joined(tmp_path: Path) -> None:
    old = {"time_s": 1.0, "event": "run_started", "pid": 0, "join_address": "/stale"}
    (tmp_path / "a.jsonl").write_text(json.dumps(old) + '\n{"event": "cut sho')
    (tmp_path / "a.jsonl").open("a").write("rt by a crash\n")
    seen = Recorder()
    assert launch_peers([command(tmp_path, name) for name in ("a", "b")], seen, FAST) == 0
    assert len(seen.of("a", "run_started")) == 1
    assert seen.of("b", "run_started")[0]["joined"] == "/here"


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_launch_without_distinct_names_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="each with its own name"):
        launch_peers([command(tmp_path, name) for name in names], Recorder())


def test_times_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"poll_s 0\.0 must be above 0"):
        LaunchConfig(poll_s=0.0)


def read(path: Path) -> list[Event]:
    """Return the events of a file that may still be growing."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def steps(directory: Path, name: str) -> int:
    return sum(event["event"] == "step" for event in read(directory / f"{name}.jsonl"))


@pytest.mark.parametrize("way", ["ctrl-c", "closed terminal"])
def test_ctrl_c_or_a_closed_terminal_reaches_peers_once(tmp_path: Path, way: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        # Tests may run under nohup or in the background, where these are ignored, and programs
        # inherit that.
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, str(LAUNCHER), str(tmp_path), *FOREVER])
    try:
        wait_until(lambda: _drained(terminal) and steps(tmp_path, "a") and steps(tmp_path, "b"))
        if way == "ctrl-c":
            os.write(terminal, b"\x03")
        else:
            os.close(terminal)
        wait_until(lambda: (way != "ctrl-c" or _drained(terminal)) and _ended(pid))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        if way == "ctrl-c":
            os.close(terminal)
        _kill_peers(tmp_path)
    assert code == 0
    for name in "ab":
        end = read(tmp_path / f"{name}.jsonl")[-1]
        assert end["event"] == "run_finished"
        assert (end["reason"], end["interrupts"]) == ("interrupted", 1)


def _drained(terminal: int) -> bool:
    """Read what the process in the terminal wrote, so that it never has to wait for a reader."""
    os.set_blocking(terminal, False)
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # nothing there now, or the other end is closed
        pass
    return True


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_peers(directory: Path) -> None:
    """Kill what a failed test may have left."""
    for name in "ab":
        for event in read(directory / f"{name}.jsonl")[:1]:
            cmdline = Path(f"/proc/{event['pid']}/cmdline")
            if cmdline.exists() and b"fake_peer.py" in cmdline.read_bytes():
                os.kill(event["pid"], signal.SIGKILL)


def test_peers_go_on_when_the_launcher_is_killed(tmp_path: Path) -> None:
    enough, told = tmp_path / "enough", tmp_path / "launcher.log"
    with told.open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, str(LAUNCHER), str(tmp_path), *FOREVER, "--until", str(enough)],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: steps(tmp_path, "a") and steps(tmp_path, "b"))
        wait_until(lambda: "a step 1/100000" in told.read_text())
        launcher.kill()
        launcher.wait(timeout=PATIENCE_S)
        made = {name: steps(tmp_path, name) for name in "ab"}
        wait_until(lambda: all(steps(tmp_path, name) > made[name] for name in "ab"))
        enough.touch()
        for name in "ab":
            wait_until(lambda name=name: read(tmp_path / f"{name}.jsonl")[-1]["event"] != "step")
            assert read(tmp_path / f"{name}.jsonl")[-1]["reason"] == "completed"
    finally:
        launcher.kill()
        launcher.wait(timeout=PATIENCE_S)
        _kill_peers(tmp_path)
