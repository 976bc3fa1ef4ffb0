"""Commands of `atom` on hostile input: each in a process of its own, with limits, and watched.

A process that has the heavy packages imported forks for each command, so that many take a minute.
In it a package `kernels` is there whose functions leave a mark when they are called, and so does
the resolver of names, which every way to a hub begins with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

from atombench import forks
from tests.support.hostile import write_stub

MOST_S = 10.0
MOST_BYTES = 2 << 30
_PROGRAM = """
import importlib, json, os, resource, signal, socket, sys, time
arguments, stub, most_s, most_bytes = json.loads(sys.argv[1])
began_s = time.monotonic()
pid = os.fork()
if pid == 0:
    sys.path.insert(0, stub)
    kernels = importlib.import_module("kernels")
    from transformers.integrations import hub_kernels
    hub_kernels.get_kernel, hub_kernels._kernels_available = kernels.get_kernel, True
    look_up = socket.getaddrinfo
    def marked(host, *more, **named):
        if host not in (None, "", "127.0.0.1", "localhost", "::1", "0.0.0.0"):
            kernels.looked_up(host)
        return look_up(host, *more, **named)
    socket.getaddrinfo = marked
    from atomtrain.cli.main import main
    sys.exit(main(arguments))
peak_bytes, ended = 0, 0
while not ended:
    ended, status, used = os.wait4(pid, os.WNOHANG)
    if not ended:
        with open(f"/proc/{pid}/statm") as stream:
            fields = stream.read().split()
        peak_bytes = max(peak_bytes, int(fields[1]) * resource.getpagesize() if fields else 0)
        if time.monotonic() - began_s > most_s or peak_bytes > most_bytes:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
took = [os.waitstatus_to_exitcode(status), time.monotonic() - began_s, peak_bytes]
print("\\n" + json.dumps(took))
"""


class Told(NamedTuple):
    """How a command ended."""

    code: int
    errors: str
    took_s: float
    peak_bytes: int
    mark: str
    """What was asked of kernels and hubs."""

    @property
    def lines(self) -> list[str]:
        """What the command complained of; other lines tell what it does."""
        return [line for line in self.errors.splitlines() if not line.startswith("reading ")]


def told(place: Path, *arguments: str, most_s: float = MOST_S) -> Told:
    """Run `atom ARGUMENTS` within an empty folder `place` of its own."""
    place.mkdir(parents=True, exist_ok=True)
    stub = place / "stub"
    environment = write_stub(stub) if not stub.exists() else {**os.environ}
    environment = {
        **environment, "HOSTILE_MARK": str(stub / "mark"), "XDG_CACHE_HOME": str(place / "cache"),
        "HF_HOME": str(place / "hub"),
    }  # fmt: skip
    order = json.dumps([arguments, str(stub), most_s, MOST_BYTES])
    done = forks.run(
        [sys.executable, "-c", _PROGRAM, order], most_s + 60.0, env=environment, cwd=str(place)
    )
    code, took_s, peak_bytes = json.loads(done.stdout.splitlines()[-1])
    file = stub / "mark"
    return Told(code, done.stderr, took_s, peak_bytes, file.read_text() if file.exists() else "")


def refused(place: Path, *arguments: str, most_s: float = MOST_S) -> str:
    """Run a command that must end in one line and exit code 2, soon and small; return the line."""
    found = told(place, *arguments, most_s=most_s)
    assert found.mark == "", "nothing is fetched, and nothing is run"
    assert found.took_s < most_s, found
    assert found.peak_bytes < MOST_BYTES, found
    assert (found.code, len(found.errors.splitlines())) == (2, 1), found.errors[-3000:]
    assert found.errors.startswith("atom: "), found.errors
    return found.errors
