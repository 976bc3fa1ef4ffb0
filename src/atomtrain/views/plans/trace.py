"""Spans as a trace that ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google, 2016): an object with `traceEvents`; complete events (`ph` is
`X`) with `ts` and `dur` in microseconds, metadata events (`M`) that name processes and threads.
One process is one account of a step (predicted, measured), one thread is one stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.planning.cost.timeline import Span
from atomtrain.views.plans.files import replacing

STREAMS = ("compute", "load", "fetch", "unload", "save", "read", "update", "write")
"""In the order in which they are shown."""
_US_PER_S = 1e6


class Account(NamedTuple):
    """One account of a step, shown as a process."""

    name: str
    """Such as `"predicted"`."""
    spans: Sequence[Span]
    """Times from any common zero."""


def trace(accounts: Sequence[Account], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace as JSON values.

    Args:
        accounts: Shown one below the other; each starts at 0.
        about: What the trace is of; for people.
    """
    events: list[dict[str, Any]] = []
    for process, account in enumerate(accounts, 1):
        streams = sorted({span.stream for span in account.spans}, key=_place)
        events.append(_named("process_name", process, 0, name=account.name))
        events.append(_named("process_sort_index", process, 0, sort_index=process))
        for stream in streams:
            thread = _place(stream) + 1
            events.append(_named("thread_name", process, thread, name=stream))
            events.append(_named("thread_sort_index", process, thread, sort_index=thread))
        zero_s = min((span.start_s for span in account.spans), default=0.0)
        events += [_complete(span, process, zero_s) for span in account.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def write_trace(path: Path, accounts: Sequence[Account], about: Mapping[str, Any]) -> None:
    """Write the trace to a file; an existing one is replaced at once or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(trace(accounts, about)) + "\n", encoding="utf-8")


def _complete(span: Span, process: int, zero_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.stream,
        "pid": process,
        "tid": _place(span.stream) + 1,
        "ts": (span.start_s - zero_s) * _US_PER_S,
        "dur": max(0.0, span.end_s - span.start_s) * _US_PER_S,
    }


def _named(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _place(stream: str) -> int:
    return STREAMS.index(stream)
