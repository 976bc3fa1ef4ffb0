"""The terminal view: loss, speed, the last recorded step and the peers, over any SSH line.

Its charts are made of characters: a curve in Braille dots, a step as bars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Static

from atomtrain.events import Event
from atomtrain.units import format_count, format_seconds
from atomtrain.views.dashboard.source import FolderSource
from atomtrain.views.runs import event_text
from atomtrain.views.runs.display import PeerView

_POLL_S = 0.5
_CURVE_LINES = 8
_LABEL_COLUMNS = 14
_SHARE_COLUMNS = 5
_FIRST_COLUMNS = 40
_MESSAGES = 8
_COLUMNS = ("peer", "step", "loss", "bits/byte", "tokens/s", "left", "peers", "round")
_STYLES = {"█": "blue", "▓": "dark_orange", "▒": "green", "░": "magenta"}
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each of a character's 4 by 2 dots, by row and column (Unicode, block U+2800)."""
STREAMS = ("load", "fetch", "compute", "save", "unload", "read", "update", "write")
PHASE_MARKS = {"forward": "█", "turn": "▓", "backward": "▒"}
_OTHER_MARK = "░"


class Drawn(Static):
    """A text that is made anew for the columns that it has."""

    def __init__(self, place: str) -> None:
        super().__init__(id=place, markup=False)
        self._make: Callable[[int], str | Text] = lambda _: ""

    def show(self, make: Callable[[int], str | Text]) -> None:
        """Show what `make` returns for a number of columns, now and whenever that changes."""
        self._make = make
        self.on_resize()

    def on_resize(self) -> None:
        """Make the text for the columns that there are now."""
        self.update(self._make(self.content_size.width or _FIRST_COLUMNS))


class Watch(App[None]):
    """Shows one peer's curves and all peers' rows."""

    TITLE = "ATOM"
    CSS = """
    #curves { height: 10; }
    #curves Static { width: 1fr; border: round $primary; }
    #step { height: auto; border: round $primary; }
    #peers { height: auto; max-height: 12; }
    #messages { height: auto; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("n", "turn(1)", "Next peer"),
        Binding("p", "turn(-1)", "Previous peer"),
    ]

    def __init__(self, source: FolderSource) -> None:
        super().__init__()
        self._source = source
        self._shown = 0
        self._laid_out = False
        self._views: dict[str, PeerView] = {}

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="head", markup=False)
            with Horizontal(id="curves"):
                yield Drawn("loss")
                yield Drawn("speed")
            yield Drawn("step")
            yield DataTable(id="peers", cursor_type="none")
            yield Static(id="messages", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#peers", DataTable).add_columns(*_COLUMNS)
        self._laid_out = True
        self._follow()
        self.set_interval(_POLL_S, self._follow)

    def action_turn(self, by: int) -> None:
        self._shown += by
        self._draw()

    def _follow(self) -> None:
        messages = self._source.poll()
        for message in messages:
            if message.kind == "events":
                view = self._views.setdefault(message.body["peer"], PeerView(message.body["peer"]))
                for event in message.body["events"]:
                    view.apply(event)
        if messages:
            self._draw()

    def _draw(self) -> None:
        names = sorted(self._source.histories)
        if not names or not self._laid_out:
            return
        name = names[self._shown % len(names)]
        history = self._source.histories[name]
        started, plan = history.newest.get("run_started", {}), history.newest.get("plan", {})
        predicted_s = event_text.number(plan, "predicted_step_s")
        head = [
            f"run {event_text.words(started, 'run') or self._source.title}",
            event_text.words(started, "model"),
            f"showing {event_text.printable(name)}",
            None if predicted_s is None else f"predicted step {format_seconds(predicted_s)}",
        ]
        self._put("head", "ATOM  " + ", ".join(part for part in head if part))
        steps = history.curves["step"]
        losses, speeds = steps.points("loss"), steps.points("tokens_per_s")
        self._drawn("loss", lambda wide: _curve("loss, nats per token", losses, wide))
        self._drawn("speed", lambda wide: _curve("tokens/s", speeds, wide))
        timeline = history.newest.get("timeline", {})
        self._drawn("step", lambda wide: _step(timeline, wide - _LABEL_COLUMNS - _SHARE_COLUMNS))
        table = self.query_one("#peers", DataTable)
        table.clear()
        for each in names:
            table.add_row(*map(Text, self._views[each].progress_cells()))
        lines = [event_text.event_line(event) for event in [*history.messages][-_MESSAGES:]]
        self._put("messages", "\n".join(line for line in lines if line) or "no messages yet")

    def _drawn(self, place: str, make: Callable[[int], str | Text]) -> None:
        self.query_one(f"#{place}", Drawn).show(make)

    def _put(self, place: str, content: str | Text) -> None:
        self.query_one(f"#{place}", Static).update(content)


def _curve(title: str, points: list[tuple[float, float]], width: int) -> str:
    newest = f": {format_count(points[-1][1])}" if points else ""
    return "\n".join((title + newest, *curve(points, width, _CURVE_LINES - 1, format_count)))


def _step(timeline: Event, width: int) -> Text:
    rows = timeline.get("measured")
    step_s = event_text.number(timeline, "step_s")
    found = bars(rows, width) if isinstance(rows, list) else []
    if not found or step_s is None:
        return Text("no step has been recorded yet")
    number = event_text.count(timeline, "step") or "?"
    text = Text(f"step {number}, measured {format_seconds(step_s)}   ")
    for phase, mark in PHASE_MARKS.items():
        text.append(mark, _STYLES[mark]).append(f" {phase}  ")
    for bar in found:
        text.append(f"\n{bar.stream:<{_LABEL_COLUMNS}}")
        for cell in bar.cells:
            text.append(cell, _STYLES.get(cell, ""))
        text.append(f" {100 * bar.busy_share:3.0f}%")
    return text


class Bar(NamedTuple):
    """One stream of a step."""

    stream: str
    cells: str
    """One character for each piece of time: how the phase there is drawn, or a space."""
    busy_share: float


def curve(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    form: Callable[[float], str] = lambda value: f"{value:.3g}",
) -> list[str]:
    """Return a curve as lines of text: a scale on the left, dots on the right.

    Args:
        points: x and y, by ascending x; those that are not finite are left out.
        width: Columns of the whole.
        height: Lines.
        form: Writes the ends of the scale.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points or height < 1:
        return ["nothing yet"] if height else []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [form(high), *[""] * (height - 2), form(low)][:height]
    margin = max(map(len, labels)) + 1
    columns = 2 * max(1, width - margin)
    rows = 4 * height
    first, last = points[0][0], points[-1][0]
    cells = [[0] * (columns // 2) for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((columns - 1) * (x - first) / (last - first)) if last > first else 0
        row = round((rows - 1) * (high - y) / (high - low)) if high > low else rows // 2
        for at, dot in _between(before, (column, row)):
            cells[dot // 4][at // 2] |= _DOTS[dot % 4][at % 2]
        before = (column, row)
    return [
        f"{label:>{margin - 1}} " + "".join(chr(_BRAILLE | cell) for cell in line)
        for label, line in zip(labels, cells, strict=True)
    ]


def bars(spans: Sequence[Sequence[object]], width: int) -> list[Bar]:
    """Return each stream of a step as a bar.

    Args:
        spans: Stream, label, start and end in seconds from any common zero, as `timeline` events
            have them; what is malformed is left out.
        width: Characters of a bar.
    """
    kept = [span for span in map(_span, spans) if span is not None]
    if not kept or width < 1:
        return []
    zero_s, end_s = min(span[2] for span in kept), max(span[3] for span in kept)
    scale = width / (end_s - zero_s)
    names = {span[0] for span in kept}
    order = [name for name in STREAMS if name in names] + sorted(names.difference(STREAMS))
    found = []
    for name in order:
        cells = [" "] * width
        busy_s, reached_s = 0.0, -math.inf
        for _, label, start_s, stop_s in sorted(s for s in kept if s[0] == name):
            mark = PHASE_MARKS.get(label.partition(" ")[0], _OTHER_MARK)
            at = min(width - 1, int(scale * (start_s - zero_s)))
            end = max(at + 1, round(scale * (stop_s - zero_s)))
            cells[at:end] = [mark] * (end - at)
        for _, _, start_s, stop_s in sorted((s for s in kept if s[0] == name), key=lambda s: s[2]):
            busy_s += max(0.0, stop_s - max(start_s, reached_s))
            reached_s = max(reached_s, stop_s)
        found.append(Bar(name, "".join(cells[:width]), busy_s / (end_s - zero_s)))
    return found


def _span(span: Sequence[object]) -> tuple[str, str, float, float] | None:
    if not isinstance(span, list | tuple) or len(span) != 4:
        return None
    stream, label, start, end = span
    numbers = isinstance(start, int | float) and isinstance(end, int | float)
    if not (isinstance(stream, str) and isinstance(label, str) and numbers):
        return None
    start_s, end_s = float(start), float(end)  # type: ignore[arg-type]
    if not (math.isfinite(start_s) and math.isfinite(end_s) and end_s > start_s):
        return None
    return stream, label, start_s, end_s


def _between(before: tuple[int, int] | None, to: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, without its first one."""
    if before is None:
        return [to]
    (x0, y0), (x1, y1) = before, to
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps))
        for i in range(1, steps + 1)
    ]
