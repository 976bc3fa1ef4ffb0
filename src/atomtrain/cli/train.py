"""`atom train`: one peer in this process, or several in processes of their own."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from atomtrain.cli.interrupts import leaving_at_once
from atomtrain.cli.parsing import COMPLAINT, complain, parse
from atomtrain.errors import ConfigError
from atomtrain.training.options import TrainOptions

LOG_FILE = "peer.log"
_EXAMPLES = """\
  atom train                                    the demo: two peers, real text, generated sentences
  atom train --model gpt3-small --data 'books/*.txt' --device-memory 256MiB
  atom train --run mine --data books/           start a run; prints the line for others to paste
  atom train --join mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...
  atom train --run mine --resume                continue after Ctrl-C or a crash"""


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        TrainOptions,
        arguments,
        prog="atom train",
        about="Train a model within a device budget, alone or with other peers.",
        examples=_EXAMPLES,
    )
    if options.n_peers > 1:
        return _run_peers(options)
    return _run_peer(options)


def _run_peer(options: TrainOptions) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with leaving_at_once():
        from atomtrain.events import EventLog
        from atomtrain.training.display import Display, DisplayConfig
        from atomtrain.training.loop import EVENTS_FILE, Loop
        from atomtrain.training.setup import make_directory, open_session

    session = open_session(options)
    try:
        make_directory(session.directory)
        events = EventLog(session.directory / EVENTS_FILE)
        display = Display(DisplayConfig(plain=options.plain))
        with display:
            events.subscribe(display.listener(session.name))
            try:
                reason = Loop(session, events).run()
            except BaseException as error:
                events.emit("warning", message=f"training failed: {error}")
                events.emit("run_finished", reason="failed", step=session.step)
                raise
        return 0 if reason == "completed" else 130
    finally:
        session.close()


def _run_peers(options: TrainOptions) -> int:
    from atomtrain.data import read_corpus
    from atomtrain.models import preset
    from atomtrain.reporting.files import require_writable
    from atomtrain.training.display import Display, DisplayConfig
    from atomtrain.training.launcher import PeerCommand, launch_peers
    from atomtrain.training.loop import EVENTS_FILE, PICTURE_FILE
    from atomtrain.training.picture import loss_picture

    # Mistakes that every peer would make are told once, here.
    if options.model is not None:
        preset(options.model)
    read_corpus(options.data)
    require_writable(options.trace, "--trace")
    if options.name is not None:
        raise ConfigError("--name names one peer; leave it out with --peers")
    run = options.run or f"{options.model or 'demo'}-{time.strftime('%m%d-%H%M%S')}"
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.n_peers)
    shared = dataclasses.replace(
        options, run=run, peers=1, threads=threads, plain=True, host=options.listen_host
    )
    base = options.directory / run
    names = [f"peer-{index}" for index in range(options.n_peers)]

    def command(index: int) -> PeerCommand:
        def argv(address: str | None) -> list[str]:
            mine = dataclasses.replace(shared, name=names[index])
            if index > 0:
                mine = dataclasses.replace(mine, port=0, join=(address or "",), trace=None)
            return [sys.executable, "-m", "atomtrain.cli.main", "train", *arguments_of(mine)]

        folder = base / names[index]
        return PeerCommand(
            name=names[index], argv=argv, events=folder / EVENTS_FILE, log=folder / LOG_FILE
        )

    with Display(DisplayConfig(plain=options.plain)) as display:
        code = launch_peers([command(index) for index in range(options.n_peers)], display)
        courses = {name: base / name / EVENTS_FILE for name in names}
        courses = {name: path for name, path in courses.items() if path.exists()}
        if code == 0 and courses:
            display.conclude(f"picture     {loss_picture(courses, base / PICTURE_FILE)}")
    if code != 0 and (complaint := _last_complaint(base / name / LOG_FILE for name in names)):
        complain(complaint)
    return code


def _last_complaint(logs: Iterable[Path]) -> str | None:
    """Return what the first peer that ended with a complaint had to say."""
    for log in logs:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        if lines and lines[-1].startswith(COMPLAINT):
            return lines[-1].removeprefix(COMPLAINT)
    return None


def arguments_of(options: TrainOptions) -> list[str]:
    """Return the command line that gives these options."""
    arguments: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        flag = "--" + field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(flag)
            continue
        for item in value if isinstance(value, tuple) else (value,):
            arguments.append(f"{flag}={_absolute(item)}")
    return arguments


def _absolute(value: object) -> str:
    return str(value.absolute()) if isinstance(value, Path) else str(value)
