"""A peer that trains nothing: it writes the events of one and reacts to signals as told."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("events", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--join")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--until", type=Path, help="complete as soon as there is this file")
    parser.add_argument("--on-sigint", choices=("save", "ignore"), default="save")
    parser.add_argument("--on-sigterm", choices=("die", "ignore"), default="die")
    parser.add_argument("--fail", type=int, default=0)
    parser.add_argument("--helper", action="store_true")
    args = parser.parse_args()
    interrupts = []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(time.time()))
    if args.on_sigterm == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if args.helper
        else None
    )
    with args.events.open("a") as file:

        def emit(event: str, **fields: object) -> None:
            file.write(json.dumps({"time_s": time.time(), "event": event, **fields}) + "\n")
            file.flush()

        emit(
            "run_started",
            join_address=args.address,
            joined=args.join,
            pid=os.getpid(),
            helper_pid=helper.pid if helper else None,
        )
        print("output of the peer")
        for step in range(1, args.steps + 1):
            time.sleep(0.02)
            emit("step", step=step, steps=args.steps, loss=1.0 / step)
            if args.until is not None and args.until.exists():
                break
            if args.fail:
                print("the reason why it failed", file=sys.stderr)
                return args.fail
            if interrupts and args.on_sigint == "save":
                time.sleep(0.3)  # time for a second signal, if somebody sends one by mistake
                emit("run_finished", reason="interrupted", step=step, interrupts=len(interrupts))
                return 0
        emit("run_finished", reason="completed", step=step, interrupts=len(interrupts))
    if helper:
        helper.kill()
        helper.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
