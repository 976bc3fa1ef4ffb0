"""Folders of runs and peers: made, checked, and taken away if nothing came of them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from atomtrain.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""The folder of a peer's checkpoints, in the folder of the peer."""


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
        raise ConfigError(
            f"there is no checkpoint in {checkpoints} to resume from; check --run and --directory"
        )


def remove_empty(directory: Path) -> None:
    """Remove the folder of a peer that never came to be: it holds at most a key nobody knows."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # other peers of the run live there
        directory.parent.rmdir()
