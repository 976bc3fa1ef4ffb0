"""Draws a step, what each stream does when: as a picture, and as a trace.

ui.perfetto.dev and chrome://tracing open a trace. Format: "Trace Event Format" (Google, 2016): an
object with `traceEvents`; complete events (`ph` is `X`) with `ts` and `dur` in microseconds,
metadata events (`M`) that name processes and threads. One process is one account of a step
(predicted, measured), one thread is one stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomtrain.files import replacing_named
from atomtrain.planning.cost.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ROWS = {
    "load": "load\nparameters",
    "fetch": "fetch\nvalues",
    "compute": "compute",
    "save": "save\nvalues",
    "unload": "unload\ngradients",
    "read": "read\n(disk)",
    "update": "update\n(host)",
    "write": "write\n(disk)",
}
"""Streams from top to bottom, in the order of the data's way, and what is written beside them."""
# Colours that stay apart for colour-blind readers (Okabe and Ito); each with a lighter neighbour,
# so that one segment ends visibly where the next one begins.
PHASES = {
    "forward": ("#0072B2", "#4C9CCB"),
    "turn": ("#D55E00", "#E58A45"),
    "backward": ("#009E73", "#4CBB9D"),
}
_OTHER = ("#7F7F7F", "#A5A5A5")
_SIZE_INCHES = (11.0, 4.4)
_PANEL_SHARE = 0.85
"""Of the picture's width, about."""
_BAR_HEIGHT = 0.72
_FONT_POINTS = 7.5
_MOST_LABELLED = 40
"""Segments beyond which a label names no bar that one could find in the plan."""
_UNITS = ((1e-3, 1e6, "microseconds"), (2.0, 1e3, "milliseconds"), (600.0, 1.0, "seconds"))


class Caption(NamedTuple):
    """What is written above the bars."""

    title: str
    """In bold: what and where."""
    facts: str
    """Below it: how long, how fast, what bounds it."""


def step_picture(spans: Sequence[Span], caption: Caption, target: Path) -> Path:
    """Draw the spans of a step as a PNG picture; return `target`.

    Args:
        spans: Labelled as in `planning.timeline`; times from any common zero, in seconds.
        caption: Written above.
        target: Replaced at once or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = step_figure(spans, caption)
    with replacing_named(target) as temporary:
        figure.savefig(temporary, format="png", dpi=160)
    return target


def step_figure(spans: Sequence[Span], caption: Caption) -> Figure:
    """Draw the spans of a step; `step_picture` says how."""
    from matplotlib.figure import Figure

    spans = [span for span in spans if span.end_s > span.start_s]
    zero_s = min((span.start_s for span in spans), default=0.0)
    length_s = max((span.end_s for span in spans), default=1e-6) - zero_s
    rows = [stream for stream in reversed(ROWS) if any(span.stream == stream for span in spans)]
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    panel = figure.subplots()
    scale, unit = _unit(length_s)
    shades = _shades(spans)
    labelled = False
    for row, stream in enumerate(rows):
        own = sorted((span for span in spans if span.stream == stream), key=lambda s: s.start_s)
        bars = [(scale * (s.start_s - zero_s), scale * (s.end_s - s.start_s)) for s in own]
        colours = [_colours(span.label)[shades[span.label]] for span in own]
        # Edges of the same colour keep bars visible that are thinner than a pixel.
        panel.broken_barh(
            bars,
            (row - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=colours,
            edgecolors=colours,
            linewidth=0.3,
            snap=False,
        )
        if len(shades) <= _MOST_LABELLED:
            labelled |= _label_row(panel, row, own, bars, scale * length_s)
        busy = f"{100 * _covered_s(own) / length_s:.0f}%"
        _beside(panel, busy, (1.0, row), ("axes fraction", "data"), (6, -3))
    _beside(panel, "busy", (1.0, 1.0), "axes fraction", (6, 6))
    _beside(panel, caption.facts, (0.0, 1.0), "axes fraction", (0, 6))
    panel.set_title(caption.title, loc="left", fontweight="bold", fontsize="large", pad=24)
    panel.set_yticks(range(len(rows)), [ROWS[stream] for stream in rows])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_xlim(0, scale * length_s)
    numbers = "; numbers are layers" if labelled else ""
    panel.set_xlabel(f"{unit} since the step began{numbers}")
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="0.9")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, spans)
    return figure


def _beside(
    panel: Axes,
    text: str,
    place: tuple[float, float],
    system: str | tuple[str, str],
    offset_points: tuple[int, int],
) -> None:
    panel.annotate(
        text, place, xycoords=system, xytext=offset_points, textcoords="offset points", color="0.3"
    )


def _label_row(
    panel: Axes, row: int, spans: Sequence[Span], bars: Sequence[tuple[float, float]], length: float
) -> bool:
    """Write the layers into the bars that are wide enough; return whether there are any."""
    points = 72 * _PANEL_SHARE * _SIZE_INCHES[0] / length
    written = False
    for span, (start, width) in zip(spans, bars, strict=True):
        text = span.label.partition(" ")[2].replace("-", "\u2013")
        if points * width > 0.62 * _FONT_POINTS * len(text) + 3:
            middle = start + width / 2
            look: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "color": "white",
                "fontsize": _FONT_POINTS,
            }
            panel.text(middle, row, text, **look)
            written = True
    return written


def _shades(spans: Sequence[Span]) -> dict[str, int]:
    """Return 0 or 1 for each label, so that neighbours on the compute stream differ."""
    order = sorted(spans, key=lambda span: (span.stream != "compute", span.start_s))
    shades: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = {}
    for span in order:
        if span.label not in shades:
            phase = _colours(span.label)
            shades[span.label] = seen.get(phase, 0) % 2
            seen[phase] = seen.get(phase, 0) + 1
    return shades


def _colours(label: str) -> tuple[str, str]:
    return PHASES.get(label.partition(" ")[0], _OTHER)


def _covered_s(spans: Sequence[Span]) -> float:
    """Return the seconds that spans of one stream cover, by their start; overlaps count once."""
    covered_s, reached_s = 0.0, float("-inf")
    for span in spans:
        covered_s += max(0.0, span.end_s - max(span.start_s, reached_s))
        reached_s = max(reached_s, span.end_s)
    return covered_s


def _unit(length_s: float) -> tuple[float, str]:
    for limit_s, scale, name in _UNITS:
        if length_s < limit_s:
            return scale, name
    return (1 / 60, "minutes") if length_s < 36_000 else (1 / 3600, "hours")


def _legend(figure: Figure, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    there = {span.label.partition(" ")[0] for span in spans}
    names = {
        "forward": "forward",
        "turn": "turn: forward and backward of the last segment",
        "backward": "backward",
    }
    patches = [
        Patch(facecolor=PHASES[phase][0], label=names[phase]) for phase in PHASES if phase in there
    ]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False
        )


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
    with replacing_named(path) as temporary:
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
