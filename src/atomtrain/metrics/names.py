"""Metrics and where they can go, by the names that users know: `tensorboard:runs/tb`, `peers`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from atomtrain.errors import ConfigError, nearest
from atomtrain.events import Event


class Metric(NamedTuple):
    """One number of a run, called the same everywhere."""

    name: str
    """Carries its unit where it has one."""
    unit: str
    event: str
    """Kind of the event that tells it."""
    field: str
    """Of that event."""
    about: str


def _told_by(event: str, *rows: tuple[str, ...]) -> tuple[Metric, ...]:
    """Return metrics of an event; a row is field, unit, what it is, and its name if another."""
    return tuple(
        Metric(name[0] if name else field, unit, event, field, about)
        for field, unit, about, *name in rows
    )


METRICS = (
    *_told_by(
        "step",
        ("step", "steps", "Optimizer steps done.", "steps"),
        ("loss", "nats per token", "Training loss of the step."),
        ("reward_accuracy", "share of 1",
         "Pairs of the step whose better answer has the higher reward."),
        ("reward_margin", "nats", "By how much, mean over the step's pairs."),
        ("accuracy", "share of 1", "Texts of the step whose class (query: text) is told right."),
        ("tokens_total", "tokens", "Tokens this peer trained on."),
        ("tokens_per_s", "tokens/s", "Speed of the step."),
        ("step_s", "s", "How long the step took."),
        ("link_wait_share", "share of 1",
         "Part of the step in which compute waited for the link or for updates."),
        ("device_peak_bytes", "bytes", "Most device memory in the step."),
        ("device_reserved_bytes", "bytes", "Most that the allocator had taken of the device."),
        ("allocation_retries", "retries",
         "Times that the allocator gave memory back and waited; above 0 is slow."),
        ("device_budget_bytes", "bytes", "The device budget."),
        ("state_bytes", "bytes", "Parameters, gradients and optimizer state on the host."),
        ("learning_rate", "1", "Learning rate of the step."),
        ("peers", "peers", "Peers that train, this one included."),
        ("time_left_s", "s", "Expected time until the last step."),
    ),
    *_told_by(
        "evaluation",
        ("loss", "nats per token", "Loss on held-out text.", "held_out_loss"),
        ("reward_accuracy", "share of 1",
         "reward_accuracy of held-out pairs.",
         "held_out_reward_accuracy"),
        ("reward_margin", "nats", "reward_margin of held-out pairs.",
         "held_out_reward_margin"),
        ("accuracy", "share of 1", "accuracy of held-out texts.",
         "held_out_accuracy"),
        ("bits_per_byte", "bits/byte",
         "Held-out loss in bits per byte, whatever the tokenizer.",
         "held_out_bits_per_byte"),
    ),
    *_told_by(
        "round",
        ("contributors", "peers", "Peers whose change is in it.", "round_contributors"),
        ("duration_s", "s", "From a round's invitation to its decision.", "round_s"),
        ("bytes_sent", "bytes", "Sent in the round.", "round_sent_bytes"),
        ("bytes_received", "bytes", "Received in the round.", "round_received_bytes"),
    ),
    *_told_by(
        "checkpoint",
        ("bytes", "bytes", "Size of the newest checkpoint.", "checkpoint_bytes"),
        ("duration_s", "s", "How long saving it took.", "checkpoint_s"),
    ),
    *_told_by(
        "plan",
        ("predicted_step_s", "s", "Step as predicted."),
        ("predicted_device_peak_bytes", "bytes", "Device memory as predicted."),
        ("host_bytes", "bytes", "Host memory as predicted.", "predicted_host_bytes"),
    ),
)  # fmt: skip
_BY_EVENT: dict[str, list[Metric]] = {}
for _metric in METRICS:
    _BY_EVENT.setdefault(_metric.event, []).append(_metric)


def values_of(event: Event) -> dict[str, float]:
    """Return the metrics that an event tells, by name; what is missing or no number is left out.

    A loss that is not finite stays in: a run that diverges must show it.
    """
    found: dict[str, float] = {}
    for metric in _BY_EVENT.get(event.get("event", ""), ()):
        value = event.get(metric.field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) or "loss" in metric.name:
                found[metric.name] = number
    return found


def table() -> str:
    """Return all metrics as a Markdown table."""
    rows = [f"| `{m.name}` | {m.unit} | `{m.event}` | {m.about} |" for m in METRICS]
    return "\n".join(("| metric | unit | event | what it is |", "|---|---|---|---|", *rows, ""))


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
        hint = " Give --metrics once for each." if "," in writer else nearest(writer, WRITERS)
        raise ConfigError(
            f"--metrics {text!r}: there is no writer {writer!r}.{hint} "
            f"Writers: {', '.join(WRITERS)}"
        )
    if writer != "prometheus":
        return Target(writer=writer, place=place or ("" if writer == "tensorboard" else _PROJECT))
    host, _, port = place.rpartition(":")
    port = port or str(USUAL_PORT)
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"--metrics {text!r}: {port!r} is not a port; write prometheus:9100, or "
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
