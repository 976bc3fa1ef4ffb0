"""The writers: each takes numbers by name and step, and knows nothing of training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from atomtrain.errors import ConfigError
from atomtrain.metrics.targets import PeerLabels, Target, require_packages


class Writer(Protocol):
    """A place that numbers go to. One thread uses it; each call may block for a while."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers, by name, that were true after `step` steps."""

    def close(self) -> None:
        """Write what is pending, and let go."""


def open_writer(target: Target, labels: PeerLabels) -> Writer:
    """Return the writer of a target.

    Raises:
        ConfigError: its package is missing, its folder cannot be made, its port is in use.
    """
    require_packages([target])
    if target.writer == "prometheus":
        from atomtrain.metrics.prometheus import Exposition

        return Exposition(target.host, target.port, labels)
    kinds: dict[str, Callable[[str, PeerLabels], Writer]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
        "trackio": _Trackio,
    }
    return kinds[target.writer](target.place, labels)


class _TensorBoard:
    """Event files below FOLDER/RUN/PEER, or in the peer's own folder."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(place) / labels.run / labels.peer if place else labels.folder / "tensorboard"
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                f"--metrics tensorboard: {folder} cannot be written ({error.strerror}); name "
                "another folder, such as tensorboard:boards"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        wandb: Any = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=place,
                group=labels.run,
                name=f"{labels.run}/{labels.peer}",
                dir=str(labels.folder),
            )
        except wandb.errors.Error as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"--metrics wandb: {said}; log in with 'wandb login', or set WANDB_MODE=offline"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, kept on this machine; `trackio show` displays it."""

    def __init__(self, place: str, labels: PeerLabels) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(project=place, name=f"{labels.run}-{labels.peer}", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
