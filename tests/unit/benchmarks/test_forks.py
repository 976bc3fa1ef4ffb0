"""What is forked behaves as what is started: arguments, folder, environment, files, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atombench import forks
from tests.support.waiting import PATIENCE_S

TELL = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("TOLD"), sys.stdin.read())
print("and this", file=sys.stderr)
"""
ENDS = {"": 0, "sys.exit(3)": 3, "sys.exit('no')": 1, "1 / 0": 1, "os.kill(os.getpid(), 9)": -9}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["code", "file", "module"])
def test_a_fork_is_told_what_a_start_is(how: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TELL)
    ways = {"code": ("-c", TELL), "file": (str(tmp_path / "told.py"),), "module": ("-m", "told")}
    command = [sys.executable, *ways[how], "a", "--b"]
    said = []
    for start in (subprocess.Popen, forks.Popen):
        with start(
            command, cwd=tmp_path, env={**os.environ, "TOLD": "yes"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            said.append((*process.communicate("asked", timeout=PATIENCE_S), process.returncode))
    assert said[0] == said[1]
    assert said[0] == (f"__main__ ['a', '--b'] {tmp_path} yes asked\n", "and this\n", 0)


@pytest.mark.slow
def test_its_end_is_seen_here() -> None:
    for code, expected in ENDS.items():
        done = forks.run([sys.executable, "-c", f"import os, sys\n{code}"], PATIENCE_S)
        assert done.returncode == expected, code
        assert ("Traceback" in done.stderr) is (code == "1 / 0")
    waiting = forks.Popen(
        [sys.executable, "-c", "print('here', flush=True); __import__('time').sleep(60)"],
        stdout=subprocess.PIPE, process_group=0,
    )  # fmt: skip
    with waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"here\n"
        assert os.getpgid(waiting.pid) == waiting.pid
        assert waiting.poll() is None
        waiting.send_signal(signal.SIGKILL)
        assert waiting.wait(PATIENCE_S) == -signal.SIGKILL


def test_what_a_program_leaves_behind_is_no_child_of_who_started_it() -> None:
    orphan = """
import os, time
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(0.01)
    print(os.getppid())
"""
    done = forks.run([sys.executable, "-c", orphan], PATIENCE_S)
    assert int(done.stdout) != os.getpid(), "nobody here would ever wait for it"
