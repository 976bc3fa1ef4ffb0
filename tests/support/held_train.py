"""`atom` in a process that stands still where it is told: what tests do then depends on no luck.

    python held_train.py KIND COUNT UNTIL ARGUMENTS...

At the COUNT-th event of a kind (`saving`: when so many checkpoints were written and one is about to
get its name) the process stops itself, all threads at once, until it gets a signal. With a path as
UNTIL only the thread that trains waits, until there is such a file; the peer goes on answering.

Peers that a command starts by itself find `held/sitecustomize.py` on their path (`held_founder`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VARIABLE = "ATOM_TEST_HOLD"


def hold(kind: str, count: int, until: str) -> None:
    """Have this process stand still, as above."""
    if kind == "saving":
        from atomtrain.checkpoint import writer

        writer._publish = _holding(writer._publish, count, until, None)
        return
    from atomtrain.events import EventLog

    EventLog.emit = _holding(EventLog.emit, count, until, kind)  # type: ignore[method-assign]


def _holding(real: Callable[..., Any], count: int, until: str, kind: str | None) -> Any:
    """Return `real`, held the `count`-th time: after it for events of a kind, else before it."""
    left = [count]

    def stand_still() -> None:
        left[0] -= 1
        if left[0] != 0:
            return
        if not until:
            os.kill(os.getpid(), signal.SIGSTOP)
        while until and not Path(until).exists():
            time.sleep(0.01)

    def held(*args: Any, **fields: Any) -> Any:
        if kind is None:
            stand_still()
        result = real(*args, **fields)
        if kind is not None and args[1] == kind:
            stand_still()
        return result

    return held


def held_founder(kind: str, count: int, until: Path) -> dict[str, str]:
    """Return an environment in which every peer that joins nobody is held."""
    path = [str(Path(__file__).with_name("held")), *sys.path]
    where = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    return {**os.environ, **where, _VARIABLE: f"{kind} {count} {until}"}


def hold_as_told() -> None:
    """Have this process stand still if its environment says so."""
    told = os.environ.get(_VARIABLE)
    if told and "train" in sys.orig_argv and "--join" not in sys.orig_argv:
        kind, count, until = told.split(" ", 2)
        hold(kind, int(count), until)


if __name__ == "__main__":
    from atomtrain.cli.main import main

    hold(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.exit(main(sys.argv[4:]))
