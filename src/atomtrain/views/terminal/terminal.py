"""The terminal view: loss, speed, the last recorded step and the peers, over any SSH line."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Footer, Static

from atomtrain.events import Event
from atomtrain.units import format_count, format_seconds
from atomtrain.views.dashboard.source import FolderSource
from atomtrain.views.runs import event_text
from atomtrain.views.runs.peer_view import PeerView
from atomtrain.views.terminal.text_charts import PHASE_MARKS, bars, curve

_POLL_S = 0.5
_CURVE_LINES = 8
_LABEL_COLUMNS = 14
_SHARE_COLUMNS = 5
_FIRST_COLUMNS = 40
_MESSAGES = 8
_COLUMNS = ("peer", "step", "loss", "bits/byte", "tokens/s", "left", "peers", "round")
_STYLES = {"█": "blue", "▓": "dark_orange", "▒": "green", "░": "magenta"}


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
        """Lay out the view."""
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
        """Begin to follow the files."""
        self.query_one("#peers", DataTable).add_columns(*_COLUMNS)
        self._laid_out = True
        self._follow()
        self.set_interval(_POLL_S, self._follow)

    def action_turn(self, by: int) -> None:
        """Show another peer's curves."""
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
        steps = [*history.steps]
        self._drawn("loss", lambda wide: _curve("loss, nats per token", steps, "loss", wide))
        self._drawn("speed", lambda wide: _curve("tokens/s", steps, "tokens_per_s", wide))
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


def _curve(title: str, events: list[Event], field: str, width: int) -> str:
    points = [
        (step, value)
        for event in events
        if (step := event_text.number(event, "step")) is not None
        and (value := event_text.number(event, field)) is not None
    ]
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
