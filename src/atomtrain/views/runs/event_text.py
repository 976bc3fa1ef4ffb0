"""Events in words: every field that a person reads is formatted here.

Events come from files and from other peers, so nothing here trusts them: a field that is missing
or of the wrong kind is left out of the text, and control characters never reach a terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from atomtrain.events import Event
from atomtrain.units import format_bytes, format_count, format_seconds

LATEST_S = 4e9  # the year 2096
STOPPING = (
    "stopping: ends this step and the round under way, then saves; "
    "Ctrl-C again ends at once, and what was learnt since the last checkpoint is lost"
)


def event_line(event: Event) -> str | None:
    """Return one line of words for an event, or `None` if it is not worth a line."""
    line_of = _LINES.get(event["event"])
    text = None if line_of is None else line_of(event)
    return printable(text) if text else None


def clock_text(event: Event) -> str:
    """Return the local time of an event (or now) as hours, minutes and seconds."""
    return time.strftime("%H:%M:%S", time.localtime(time_of_s(event) or None))


def join_address(*events: Event) -> str | None:
    """Return the first address that others can join at, from any of the events that carry one."""
    for event in events:
        key = {"run_started": "join_address", "listening": "address"}.get(event.get("event", ""))
        if key and (address := words(event, key)):
            return address
    return None


def printable(text: str) -> str:
    """Return `text` on one line, without characters that would steer a terminal."""
    flat = " ".join(text.split())
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in flat
    )


def words(event: Event, key: str) -> str | None:
    """Return a field as printable text, or `None` if it is missing or empty."""
    value = event.get(key)
    if value is None or value == "" or isinstance(value, list | dict):
        return None
    return printable(str(value))


def number(event: Event, key: str) -> float | None:
    """Return a field as a finite number, or `None`."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number too large for a float
        return None


def count(event: Event, key: str) -> str | None:
    """Return a whole number (or the length of a list) in full."""
    value = event.get(key)
    if isinstance(value, list):
        return str(len(value))
    return optional(lambda found: f"{found:.0f}", number(event, key))


def decimal(event: Event, key: str) -> str | None:
    """Return a number with three decimals; a loss that is not finite is shown as what it is."""
    value = event.get(key)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return optional(lambda found: f"{found:.3f}", number(event, key))


def share(event: Event, key: str) -> str | None:
    """Return a share from 0 to 1 in per cent."""
    return optional(lambda found: f"{found:.1%}", number(event, key))


def rate(event: Event) -> str | None:
    """Return the tokens per second."""
    return optional(format_count, number(event, "tokens_per_s"))


def duration(value_s: float) -> str:
    """Return a duration in words; what is left of a run can be nothing."""
    return format_seconds(value_s) if value_s > 0 else "0 s"


def size(event: Event, key: str) -> str | None:
    """Return a number of bytes with its unit."""
    return optional(format_bytes, number(event, key))


def steps_text(event: Event) -> str | None:
    """Return for example `120/2000`."""
    return "/".join(filter(None, (count(event, "step"), count(event, "steps")))) or None


def memory_text(event: Event) -> str:
    """Return for example `58.1 of 64.0 MiB, model state 312.0 MiB`."""
    peak, state = size(event, "device_peak_bytes"), size(event, "state_bytes")
    budget = size(event, "device_budget_bytes") or size(event, "device_memory_bytes")
    if peak and budget and peak.split()[1] == budget.split()[1]:
        peak = peak.split()[0]
    device = f"{peak} of {budget}" if peak and budget else peak or (budget and f"of {budget}")
    return _sentence(device, state and f"model state {state}")


def sample_text(event: Event) -> str:
    """Return the prompt and what the model made of it."""
    prompt, text = (printable(str(event.get(key) or "")) for key in ("prompt", "text"))
    return f'"{prompt}" -> {text}'


def time_of_s(event: Event) -> float:
    """Return the Unix time of an event, or 0 if there is none that a calendar can show."""
    found_s = number(event, "time_s") or 0.0
    return found_s if 0 <= found_s < LATEST_S else 0.0


def optional(form: Callable[[float], str], value: float | None) -> str | None:
    """Return `form(value)`, or `None` if there is no value."""
    return None if value is None else form(value)


def _sentence(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)


def tag(value: str | None, form: str) -> str | None:
    """Return `form` with `{}` replaced by `value`, or `None` if there is no value."""
    return None if value is None else form.replace("{}", value)


def _started_line(event: Event) -> str:
    parameters = optional(format_count, number(event, "parameters"))
    tokens = optional(format_count, number(event, "tokens_per_step"))
    return _sentence(
        tag(words(event, "run"), "started run {}"),
        tag(words(event, "model"), "model {}"),
        tag(parameters, "{} parameters"),
        tag(words(event, "device"), "device {}"),
        tag(size(event, "device_memory_bytes"), "device memory {}"),
        tag(words(event, "precision"), "precision {}"),
        tag(size(event, "state_bytes"), "model state {}"),
        tag(count(event, "steps"), "{} steps"),
        tag(tokens, "{} tokens a step"),
        tag(words(event, "data"), "data {}"),
        tag(size(event, "fetched_bytes"), "{} fetched") if event.get("fetched_bytes") else None,
    )


def _data_line(event: Event) -> str:
    filled = "packing fills {} of each" if event.get("packed") else None
    cut = tag(count(event, "cut_rows"), "{} rows are cut at ") if event.get("cut_rows") else None
    return "data: " + _sentence(
        tag(count(event, "rows"), "{} rows"),
        tag(count(event, "sequences"), "{} sequences"),
        filled and tag(share(event, "filled_share"), filled),
        cut and tag(count(event, "context_tokens"), cut + "{} tokens"),
        tag(count(event, "dropped_rows"), "{} rows are left out, with no answer within")
        if event.get("dropped_rows")
        else None,
    )


def _step_line(event: Event) -> str:
    return _sentence(
        tag(steps_text(event), "step {}"),
        tag(decimal(event, "loss"), "loss {}"),
        *_rewards(event),
        tag(rate(event), "{} tokens/s"),
        tag(optional(duration, number(event, "time_left_s")), "{} left"),
        tag(memory_text(event) or None, "device {}"),
        tag(share(event, "link_wait_share"), "link wait {}"),
        tag(count(event, "peers"), "peers {}"),
        tag(count(event, "round"), "round {}"),
    )


def _round_line(event: Event) -> str:
    outcome, reason = words(event, "outcome"), words(event, "reason")
    title = f"round {count(event, 'round') or '?'} {outcome or 'ended'}"
    fragment = tag(count(event, "fragment"), "fragment {}")
    if outcome == "abandoned":
        took = optional(duration, number(event, "duration_s"))
        return f"{_sentence(title, fragment, took, reason)}; nothing is lost"
    return _sentence(
        title,
        fragment,
        tag(count(event, "contributors"), "contributors {}"),
        tag(size(event, "bytes_sent"), "{} sent"),
        tag(size(event, "bytes_received"), "{} received"),
        optional(duration, number(event, "duration_s")),
        reason,
    )


def _names(event: Event, key: str) -> str | None:
    value = event.get(key)
    return " ".join(map(str, value)) or None if isinstance(value, list) else None


def _membership_line(event: Event) -> str:
    return _sentence(
        tag(count(event, "peers"), "peers {}"),
        tag(_names(event, "joined"), "joined: {}"),
        tag(_names(event, "left"), "left: {}"),
    )


def _evaluation_line(event: Event) -> str:
    return "held-out " + _sentence(
        tag(decimal(event, "bits_per_byte"), "bits per byte {}"),
        tag(decimal(event, "loss"), "loss {}"),
        *_rewards(event),
        tag(count(event, "step"), "step {}"),
    )


def _rewards(event: Event) -> tuple[str | None, ...]:
    """Return what is told of pairs of answers, and of texts of several classes."""
    return (
        tag(share(event, "accuracy"), "accuracy {}"),
        tag(share(event, "reward_accuracy"), "preferred {}"),
        tag(decimal(event, "reward_margin"), "margin {}"),
    )


def _checkpoint_line(event: Event) -> str:
    return "checkpoint " + _sentence(
        words(event, "path"),
        tag(count(event, "step"), "step {}"),
        size(event, "bytes"),
        optional(duration, number(event, "duration_s")),
    )


def _finished_line(event: Event) -> str:
    return "run " + _sentence(
        words(event, "reason") or "finished",
        tag(count(event, "step"), "step {}"),
        tag(decimal(event, "loss"), "loss {}"),
        tag(decimal(event, "bits_per_byte"), "held-out bits per byte {}"),
    )


def _again_line(event: Event) -> str | None:
    before_s, now_s = number(event, "predicted_before_s"), number(event, "predicted_step_s")
    if not before_s or not now_s or min(before_s, now_s) < 0:
        return None
    by = "another plan" if event.get("changed") else "the same plan"
    return (
        "measured again, since other programs leave the processor alone now: steps are predicted "
        f"at {format_seconds(now_s)} by {by}, not at {format_seconds(before_s)}"
    )


def _prediction_line(event: Event) -> str | None:
    took_s, predicted_s = number(event, "step_s"), number(event, "predicted_step_s")
    if not took_s or not predicted_s or min(took_s, predicted_s) < 0:
        return None
    off = took_s / predicted_s - 1
    line = (
        f"steps took {format_seconds(took_s)}, {abs(off):.0%} {'more' if off > 0 else 'less'} than "
        f"the predicted {format_seconds(predicted_s)}"
    )
    again = "; this machine is measured anew at the next start"
    return line + again if event.get("profiles_anew") else line


def _lost_line(event: Event) -> str:
    output = tag(words(event, "log"), "its output is in {}")
    return "lost: " + _sentence(words(event, "reason") or "unknown reason", output)


_LINES: dict[str, Callable[[Event], str | None]] = {
    "run_started": _started_line,
    "data": _data_line,
    "step": _step_line,
    "evaluation": _evaluation_line,
    "round": _round_line,
    "membership": _membership_line,
    "expelled": lambda event: f"expelled {words(event, 'name')}: {words(event, 'reason')}",
    "checkpoint": _checkpoint_line,
    "sample": lambda event: f"sample {sample_text(event)}",
    "warning": lambda event: f"warning: {words(event, 'message') or 'unknown'}",
    "planned_again": _again_line,
    "prediction": _prediction_line,
    "stopping": lambda _: STOPPING,
    "run_finished": _finished_line,
    "peer_lost": _lost_line,
}
