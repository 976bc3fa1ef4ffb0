"""`atom train`: one peer in this process, or several in processes of their own."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from atomtrain.cli.parsing import COMPLAINT, complain, given_options, leaving_at_once, parser_of
from atomtrain.errors import ConfigError
from atomtrain.metrics.names import parse_targets, require_packages
from atomtrain.settings import flag_of
from atomtrain.topology import allowed_cores
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.other_names import ADVICE, KINDS, translated
from atomtrain.training.config.preflight import check_early, unnamed_run

LOG_FILE = "peer.log"
RECIPE = "recipe"
_OTHER = "other_"
"""Begins where the parser keeps what stands under a name of another tool."""
_STOPPED_AT_ONCE = "stopped at once: --resume goes on from the newest checkpoint, if there is one"
ABOUT = "Train a model within a device budget, alone or with other peers."
_EXAMPLES = """\
  atom train                                    the demo: two peers, real text, generated sentences
  atom train pretrain-small --data 'books/*.txt'  a ready recipe; 'atom init' writes your own
  atom train --model gpt3-small --data 'books/*.txt' --device-memory 256MiB
  atom train --run mine --data books/           start a run; prints the line for others to paste
  atom train --join mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...
  atom train --run mine --resume                continue after Ctrl-C or a crash"""


def run(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    require_packages(parse_targets(options.metrics))
    check_early(options)
    if options.dry_run:
        with leaving_at_once():
            from atomtrain.training.tools.preview import dry_run

        sys.stdout.write(dry_run(options))
        return 0
    if options.n_peers > 1:
        return _run_peers(options)
    return _run_peer(options)


def options_of(arguments: Sequence[str]) -> TrainOptions:
    """Return the options of a command line, those of its recipe file included.

    Raises:
        ConfigError: a mistake in the command line or in the recipe file.
    """
    parser = command_parser()
    _add_other_names(parser)
    given = given_options(TrainOptions, parser, arguments)
    others = {name: given.pop(_OTHER + name) for name in KINDS if _OTHER + name in given}
    recipe = given.pop(RECIPE, None)
    if recipe is None:
        understood = translated(others, given)
        try:
            options = TrainOptions(**given, **understood.values)
        except ConfigError as error:
            if not understood.line:
                raise
            raise ConfigError(f"{error} ({understood.line})") from error
        if understood.line:
            complain(understood.line)
        return options
    from atomtrain.training.config.recipe_files import options_with, read_recipe, recipe_path

    file = read_recipe(recipe_path(recipe))
    understood = translated(others, given, file.values)
    if file.told:
        complain(f"{file.path}: {file.told}")
    if understood.line:
        complain(understood.line)
    return options_with(file, {**given, **understood.values})


def _add_other_names(parser: argparse.ArgumentParser) -> None:
    """Let a command line use the names of other tools; the help leaves them out."""
    for name, kind in KINDS.items():
        settings: dict[str, Any] = {"type": kind}
        if kind is bool:
            settings = {"nargs": "?", "const": True, "type": _truth}
        flag = flag_of(name)
        parser.add_argument(flag, dest=_OTHER + name, help=argparse.SUPPRESS, **settings)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"true or false, not {text!r}")
    return text.lower() == "true"


def command_parser() -> argparse.ArgumentParser:
    parser = parser_of(TrainOptions, prog="atom train", about=ABOUT, examples=_EXAMPLES)
    parser.advice = ADVICE
    parser.add_argument(
        RECIPE,
        nargs="?",
        metavar="RECIPE",
        help="YAML file whose keys are the options below, or the name of a ready recipe; options "
        "beside it count more.",
    )
    return parser


def _run_peer(options: TrainOptions) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with leaving_at_once():
        from atomtrain.events import EVENTS_FILE, RECIPE_FILE, EventLog
        from atomtrain.metrics.names import PeerLabels
        from atomtrain.metrics.writers import MetricsFeed
        from atomtrain.training.config.preflight import make_directory
        from atomtrain.training.config.recipe_files import recipe_text
        from atomtrain.training.loop import Loop
        from atomtrain.training.setup.setup import open_session
        from atomtrain.views.runs.display import Display, DisplayConfig

    session = open_session(options, _tell)
    try:
        make_directory(session.directory)
        (session.directory / RECIPE_FILE).write_text(recipe_text(options), encoding="utf-8")
        events = EventLog(session.directory / EVENTS_FILE)
        display = Display(DisplayConfig(plain=options.plain, join_command=_join_command(options)))
        labels = PeerLabels(session.run, session.name, session.directory)
        feed = MetricsFeed(parse_targets(options.metrics), labels)
        with display, contextlib.closing(feed):
            events.subscribe(display.listener(session.name))
            events.subscribe(feed.listen)
            try:
                reason = Loop(session, events).run()
            except KeyboardInterrupt:
                events.emit("warning", message=_STOPPED_AT_ONCE)
                events.emit("run_finished", reason="interrupted", step=session.step)
                raise
            except BaseException as error:
                events.emit("warning", message=f"training failed: {error}")
                events.emit("run_finished", reason="failed", step=session.step)
                raise
        return 0 if reason == "completed" else 130
    finally:
        session.close()


def _join_command(options: TrainOptions) -> str:
    """Return what others type in front of the address: with the key, if the run has one."""
    key = "" if options.run_key is None else f" --run-key {shlex.quote(str(options.run_key))}"
    return f"atom train{key} --join"


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _run_peers(options: TrainOptions) -> int:
    from atomtrain.data.corpus import read_corpus
    from atomtrain.data.rows import has_rows
    from atomtrain.data.weighted import parse_weighted
    from atomtrain.engine.devices.device_names import GPU_KINDS
    from atomtrain.events import EVENTS_FILE, PICTURE_FILE
    from atomtrain.files import require_writable
    from atomtrain.metrics.names import for_local_peer
    from atomtrain.training.launcher import PeerCommand, launch_peers
    from atomtrain.views.runs.display import Display, DisplayConfig

    # Mistakes that every peer would make are told once, here. The demo waits for no torch.
    model = "demo"
    if options.model is not None:
        from atomtrain.training.config.new_recipe import check_model, model_name

        check_model(options.model)
        model = Path(model_name(options.model)).name
    if options.device.startswith(GPU_KINDS):
        with leaving_at_once():
            from atomtrain.engine.devices.gpus import require_gpus

        require_gpus(options.device)
    for given in options.data or (None,):
        spec = given and parse_weighted(given).spec
        if not has_rows(spec):
            read_corpus(spec)
    require_writable(options.trace, "--trace")
    if options.name is not None:
        raise ConfigError("--name names one peer; leave it out with --peers")
    if options.identity is not None:
        raise ConfigError("--identity is the key of one peer; leave it out with --peers")
    run = options.run or unnamed_run(model, options.directory)
    threads = options.threads or max(1, len(allowed_cores()) // options.n_peers)
    shared = dataclasses.replace(
        options, run=run, peers=1, threads=threads, plain=True, host=options.listen_host
    )
    base = options.directory / run
    names = [f"peer-{index}" for index in range(options.n_peers)]

    def command(index: int) -> PeerCommand:
        def argv(address: str | None) -> list[str]:
            metrics = tuple(for_local_peer(text, index) for text in options.metrics)
            mine = dataclasses.replace(shared, name=names[index], metrics=metrics)
            if index > 0:
                mine = dataclasses.replace(
                    mine,
                    port=0,
                    join=(address or "",),
                    trace=None,
                    profile_again=False,
                    epochs=None,
                    warmup_ratio=None,  # the run's recipe knows its steps
                )
            return [sys.executable, "-m", "atomtrain.cli.main", "train", *arguments_of(mine)]

        folder = base / names[index]
        return PeerCommand(
            name=names[index], argv=argv, events=folder / EVENTS_FILE, log=folder / LOG_FILE
        )

    config = DisplayConfig(plain=options.plain, join_command=_join_command(options))
    with Display(config) as display:
        code = launch_peers([command(index) for index in range(options.n_peers)], display)
        courses = {name: base / name / EVENTS_FILE for name in names}
        courses = {name: path for name, path in courses.items() if path.exists()}
        if code == 0 and courses:
            from atomtrain.views.runs.picture import loss_picture

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
        if value == field.default:
            continue
        flag = flag_of(field.name)
        if isinstance(value, bool):
            arguments.append(flag if value else f"{flag}=false")
            continue
        for item in value if isinstance(value, tuple) else (value,):
            arguments.append(f"{flag}={item.absolute() if isinstance(item, Path) else item}")
    return arguments
