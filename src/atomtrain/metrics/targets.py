"""Where metrics can go, as users name it: `tensorboard:runs/tb`, `prometheus:9100`."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomtrain.errors import ConfigError, nearest

WRITERS = ("tensorboard", "wandb", "trackio", "prometheus")
EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Package of each writer that needs one; the extra of atomtrain has the same name."""
LOOPBACK = "127.0.0.1"
USUAL_PORT = 9100
_PROJECT = "atom"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One place that metrics go to."""

    writer: str
    """One of `WRITERS`."""
    place: str = ""
    """Folder of tensorboard (empty: the peer's own), project of wandb and trackio."""
    host: str = LOOPBACK
    """IPv4 address on which Prometheus' endpoint listens."""
    port: int = 0


@dataclass(frozen=True)
class PeerLabels:
    """Whose numbers they are."""

    run: str
    peer: str
    folder: Path


def parse_target(text: str) -> Target:
    """Return what `--metrics TEXT` means.

    Raises:
        ConfigError: no such writer, or a place that cannot be.
    """
    writer, _, place = text.partition(":")
    if writer not in WRITERS:
        raise ConfigError(
            f"--metrics {text!r}: there is no writer {writer!r}.{nearest(writer, WRITERS)} "
            f"Writers: {', '.join(WRITERS)}"
        )
    if writer != "prometheus":
        return Target(writer=writer, place=place or ("" if writer == "tensorboard" else _PROJECT))
    host, _, port = place.rpartition(":")
    port = port or str(USUAL_PORT)
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"--metrics {text!r}: {port!r} is no port; write prometheus:9100, or "
            "prometheus:0.0.0.0:9100 to let other machines read"
        )
    return Target(writer=writer, host=host or LOOPBACK, port=int(port))


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """Return what several `--metrics` mean.

    Raises:
        ConfigError: one of them cannot be, or a writer is named twice.
    """
    targets = tuple(map(parse_target, texts))
    writers = [target.writer for target in targets]
    for writer in WRITERS:
        if writers.count(writer) > 1:
            raise ConfigError(f"--metrics names {writer} twice; give it once")
    return targets


def require_packages(targets: Sequence[Target]) -> None:
    """Refuse writers whose package is not installed; imports nothing.

    Raises:
        ConfigError: names the extra.
    """
    for target in targets:
        package = EXTRAS.get(target.writer)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--metrics {target.writer} needs the package {package}; run "
                f"pip install 'atomtrain[{package}]'"
            )


def for_local_peer(text: str, index: int) -> str:
    """Return the same target for the `index`-th peer on this machine: each needs its own port."""
    target = parse_target(text)
    if target.writer != "prometheus" or target.port == 0:
        return text
    target = dataclasses.replace(target, port=target.port + index)
    return f"prometheus:{target.host}:{target.port}"
