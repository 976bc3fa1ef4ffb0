"""The one table of metrics: what each is called, its unit, and the event that it comes from."""

from __future__ import annotations

import math
from typing import NamedTuple

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


METRICS = (
    Metric("steps", "steps", "step", "step", "Optimizer steps done."),
    Metric("loss", "nats per token", "step", "loss", "Training loss of the step."),
    Metric(
        "reward_accuracy", "share of 1", "step", "reward_accuracy",
        "Pairs of the step in which the better answer has the higher reward.",
    ),
    Metric(
        "reward_margin", "nats", "step", "reward_margin",
        "By how much its reward is higher, mean over the step's pairs.",
    ),
    Metric("tokens_total", "tokens", "step", "tokens_total", "Tokens this peer trained on."),
    Metric("tokens_per_s", "tokens/s", "step", "tokens_per_s", "Speed of the step."),
    Metric("step_s", "s", "step", "step_s", "How long the step took."),
    Metric(
        "link_wait_share", "share of 1", "step", "link_wait_share",
        "Part of the step in which compute waited for the link or for updates.",
    ),
    Metric(
        "device_peak_bytes", "bytes", "step", "device_peak_bytes", "Most device memory in the step."
    ),
    Metric("device_budget_bytes", "bytes", "step", "device_budget_bytes", "The device budget."),
    Metric(
        "state_bytes", "bytes", "step", "state_bytes",
        "Parameters, gradients and optimizer state on the host.",
    ),
    Metric("learning_rate", "1", "step", "learning_rate", "Learning rate of the step."),
    Metric("peers", "peers", "step", "peers", "Peers that train, this one included."),
    Metric("time_left_s", "s", "step", "time_left_s", "Expected time until the last step."),
    Metric("held_out_loss", "nats per token", "evaluation", "loss", "Loss on held-out text."),
    Metric(
        "held_out_reward_accuracy", "share of 1", "evaluation", "reward_accuracy",
        "Held-out pairs in which the better answer has the higher reward.",
    ),
    Metric(
        "held_out_reward_margin", "nats", "evaluation", "reward_margin",
        "By how much its reward is higher, mean over held-out pairs.",
    ),
    Metric(
        "held_out_bits_per_byte", "bits/byte", "evaluation", "bits_per_byte",
        "Held-out loss in bits per byte of text, whatever the tokenizer.",
    ),
    Metric(
        "round_contributors", "peers", "round", "contributors", "Peers whose change is in it."
    ),
    Metric("round_s", "s", "round", "duration_s", "From a round's invitation to its decision."),
    Metric("round_sent_bytes", "bytes", "round", "bytes_sent", "Sent in the round."),
    Metric("round_received_bytes", "bytes", "round", "bytes_received", "Received in the round."),
    Metric("checkpoint_bytes", "bytes", "checkpoint", "bytes", "Size of the newest checkpoint."),
    Metric("checkpoint_s", "s", "checkpoint", "duration_s", "How long saving it took."),
    Metric("predicted_step_s", "s", "plan", "predicted_step_s", "Step as the plan predicts it."),
    Metric(
        "predicted_device_peak_bytes", "bytes", "plan", "predicted_device_peak_bytes",
        "Device memory as the plan predicts it.",
    ),
    Metric("predicted_host_bytes", "bytes", "plan", "host_bytes", "Host memory as predicted."),
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
