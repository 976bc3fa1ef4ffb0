"""`atom watch`: a run in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError
from atomtrain.training.config.options import option

_EXAMPLES = """\
  atom watch runs/mine              all peers of a run on this machine
  ssh -t host atom watch runs/mine  on another one"""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What a user can say to `atom watch`."""

    target: Path = option(None, "Folder of a run or of a peer.", "FOLDER")


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        WatchOptions,
        arguments,
        prog="atom watch",
        about="Show a run in the terminal: loss, speed, the last recorded step, peers.",
        examples=_EXAMPLES,
        positional=("target",),
    )
    from atomtrain.views.dashboard.source import FolderSource

    source = FolderSource(options.target)
    if not sys.stdout.isatty():
        raise ConfigError(
            "'atom watch' needs a terminal; 'atom dashboard' shows the run in a browser"
        )
    try:
        from atomtrain.views.dashboard.terminal import Watch
    except ImportError as error:
        raise ConfigError(
            f"'atom watch' needs a package that is not installed ({error}); run "
            "pip install 'atomtrain[watch]'"
        ) from error
    Watch(source).run()
    return 0
