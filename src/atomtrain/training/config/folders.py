"""Folders of runs and peers: made, checked, and taken away if nothing came of them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from atomtrain.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""The folder of a peer's checkpoints, in the folder of the peer."""
FIRST_NAME = "peer-0"
"""What a peer is called that starts a run."""


def make_directory(directory: Path) -> None:
    """Make the folder of a peer, if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}); choose another --directory"
        ) from error


def check_directory(directory: Path, *, resume: bool) -> None:
    """Refuse a peer's folder that holds a run already, or, to resume, one that holds none.

    Raises:
        ConfigError: says which.
    """
    checkpoints = directory / CHECKPOINTS
    if not resume and checkpoints.is_dir() and any(checkpoints.glob("step-*")):
        raise ConfigError(
            f"{directory} already holds a run; continue it with --run {directory.parent.name} "
            "--resume, or choose another --run name"
        )
    if resume and not checkpoints.is_dir():
        saved = _saved_peers(directory.parent)
        fix = f"give --name {' or '.join(saved)}" if saved else "check --run and --directory"
        raise ConfigError(f"there is no checkpoint in {checkpoints} to resume from; {fix}")


def resumed_name(run: Path) -> str:
    """Return whom to resume in a run's folder if nobody is named: the only one that has saved.

    Who joined a run was given a name, which nobody remembers.
    """
    saved = _saved_peers(run)
    return saved[0] if len(saved) == 1 else FIRST_NAME


def _saved_peers(run: Path) -> list[str]:
    """Return the names of a run's peers that have checkpoints on this machine."""
    return sorted({path.parent.parent.name for path in run.glob(f"*/{CHECKPOINTS}/step-*")})


def remove_empty(directory: Path) -> None:
    """Remove the folder of a peer that never came to be: it holds at most a key nobody knows."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # other peers of the run live there
        directory.parent.rmdir()
