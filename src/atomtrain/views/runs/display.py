"""Shows the events of one peer or several: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atomtrain.errors import ConfigError
from atomtrain.events import Event, Listener
from atomtrain.units import format_count
from atomtrain.views.runs import event_text as text

KEPT_SAMPLES = 3


class PeerView:
    """The newest event of each kind from one peer, and the table cells that follow from them."""

    def __init__(self, name: str) -> None:
        self.name = text.printable(name)
        self.samples: deque[Event] = deque(maxlen=KEPT_SAMPLES)
        self._newest: dict[str, Event] = {}

    def apply(self, event: Event) -> None:
        """Take in one event; events of unknown kinds change nothing that is shown."""
        kind = event["event"]
        if kind == "run_started":  # the peer came back: its former end is no longer true
            self._newest.pop("run_finished", None)
            self._newest.pop("peer_lost", None)
        elif kind == "sample":
            self.samples.append(event)
        self._newest[kind] = event

    def newest(self, kind: str) -> Event:
        """Return the newest event of `kind`, or an empty one."""
        return self._newest.get(kind, {})

    @property
    def state(self) -> str:
        """One of starting, training, completed, interrupted, failed, lost."""
        if "run_finished" in self._newest:
            return text.words(self.newest("run_finished"), "reason") or "finished"
        if "peer_lost" in self._newest:
            return "lost"
        return "training" if "step" in self._newest else "starting"

    def progress_cells(self) -> list[str]:
        """Return peer, step, loss, bits per byte, tokens/s, time left or state, peers, round."""
        step, evaluation, last_round = map(self.newest, ("step", "evaluation", "round"))
        left_s = text.number(step, "time_left_s")
        running = self.state == "training" and left_s is not None
        round_parts = (text.count(last_round, "round"), text.words(last_round, "outcome"))
        return [
            self.name,
            text.steps_text(step) or "-",
            text.decimal(step, "loss") or "-",
            text.decimal(evaluation, "bits_per_byte") or "-",
            text.rate(step) or "-",
            text.duration(left_s) if running and left_s is not None else self.state,
            text.count(max(step, self.newest("membership"), key=text.time_of_s), "peers") or "-",
            " ".join(part for part in round_parts if part) or "-",
        ]

    def memory_cells(self) -> list[str]:
        """Return the device memory in words and the share of time spent waiting for the link."""
        started, step = self.newest("run_started"), self.newest("step")
        return [
            text.memory_text({**started, **step}) or "-",
            text.share(step, "link_wait_share") or "-",
        ]

    def summary(self) -> list[str]:
        """Return the lines that say how the peer's run ended and what it left behind."""
        end, step = self.newest("run_finished"), self.newest("step")
        at = text.count(end, "step") or text.count(step, "step")
        lost = self.newest("peer_lost")
        held_out = self.newest("evaluation")
        loss = text.decimal(end, "loss") or text.decimal(step, "loss")
        bits = text.decimal(end, "bits_per_byte") or text.decimal(held_out, "bits_per_byte")
        path = text.words(end, "checkpoint") or text.words(self.newest("checkpoint"), "path")
        held_out_margin = text.decimal(held_out, "reward_margin")
        accuracy = text.share(held_out, "accuracy")
        unit = "nats per token" if held_out_margin is None else "nats per pair"
        unit = unit if accuracy is None else "nats per text"
        facts = {
            "reason": text.words(lost, "reason"),
            "loss": text.tag(loss, f"{{}} {unit}"),
            "held-out": text.tag(bits, "{} bits per byte"),
            "preferred": text.tag(
                text.share(held_out, "reward_accuracy"), f"{{}}, margin {held_out_margin} nats"
            ),
            "accuracy": text.tag(accuracy, "{} of held-out texts"),
            "duration": text.optional(text.duration, text.number(end, "duration_s")),
            "checkpoint": path,
            "picture": text.words(end, "picture"),
            "output": text.words(lost, "log"),
        }
        lines = [f"{self.name}: {self.state}" + (f" at step {at}" if at else "")]
        lines += [f"  {label:<11}{value}" for label, value in facts.items() if value]
        return lines + [f"  {'sample':<11}{text.sample_text(sample)}" for sample in self.samples]


ROOMY_COLUMNS = 100
WIDE_COLUMNS = 140
ROW_KINDS = frozenset(("run_started", "step", "evaluation", "run_finished", "peer_lost"))
MESSAGE_KINDS = frozenset(
    (
        "evaluation", "membership", "checkpoint", "sample", "warning", "stopping", "data",
        "planned_again", "prediction", "run_finished", "peer_lost",
    )
)  # fmt: skip
STYLES = {"lost": "red", "failed": "red", "completed": "green", "interrupted": "yellow"}


@dataclass(frozen=True, kw_only=True)
class DisplayConfig:
    """How much is shown, and how often."""

    plain_interval_s: float = 10.0
    """Seconds, at least 0: a peer's step and round lines come at most this often without a
    terminal. The first and the last step, and rounds that failed, are always shown."""

    refreshes_per_s: float = 4.0
    """Times a second that the live view is drawn; above 0."""

    messages: int = 6
    """Lines kept below the live view; at least 1."""

    plain: bool = False
    """Plain lines even in a terminal."""

    join_command: str = "atom train --join"
    """What to type in front of the address to join the run."""

    def __post_init__(self) -> None:
        if not (self.plain_interval_s >= 0 and self.refreshes_per_s > 0 and self.messages >= 1):
            raise ConfigError(
                f"display: plain_interval_s {self.plain_interval_s} must be at least 0, "
                f"refreshes_per_s {self.refreshes_per_s} above 0 and messages {self.messages} "
                "at least 1; leave them out for the defaults"
            )


class Display:
    """Turns events into a live view or plain lines, and into a summary when it is closed.

    The live view is drawn by a thread of its own; only plain lines, and the few lines that stay in
    sight above the view, are written by the caller of `update`.

    Thread-safe: `update` may be called from any thread. If the reader of the output goes away
    (a closed pipe or terminal), the display falls silent and training goes on.
    """

    def __init__(
        self,
        config: DisplayConfig | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show on `stream` (standard output if `None`); `clock` paces plain lines, in seconds."""
        self._config = config or DisplayConfig()
        self._stream = stream or sys.stdout
        self._clock = clock
        self._lock = threading.Lock()  # guards the state below; never held while writing
        self._peers: dict[str, PeerView] = {}
        self._messages: deque[str] = deque(maxlen=self._config.messages)
        self._conclusion: list[str] = []
        self._shown: set[str] = set()
        self._last_line_s: dict[tuple[str, str], float] = {}
        self._writing = threading.Lock()
        self._gone = self._closed = False
        terminal = self._stream.isatty() and not self._config.plain
        self._console = Console(file=self._stream, force_terminal=terminal, highlight=False)
        self._live: Live | None = None
        if terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._view,
                refresh_per_second=self._config.refreshes_per_s,
                vertical_overflow="ellipsis",
                # What others print would tear the view, unless it goes somewhere else anyway.
                redirect_stdout=self._stream is sys.stdout,
                redirect_stderr=self._stream is sys.stdout and sys.stderr.isatty(),
            )
            self._live.start()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the display, also after an error, so that the terminal is left in order."""
        self.close()

    def listener(self, peer_name: str) -> Listener:
        """Return a listener that shows what `peer_name` emits."""
        return lambda event: self.update(peer_name, event)

    def update(self, peer_name: str, event: Event) -> None:
        """Take in one event of one peer. Unknown kinds and missing fields are no error."""
        with self._lock:
            lines = self._take(peer_name, event)
        self._write(lines)

    def note(self, message: str) -> None:
        """Show a message that belongs to no peer."""
        line = f"{time.strftime('%H:%M:%S')} {text.printable(message)}"
        with self._lock:
            self._messages.append(line)
        if self._live is None:
            self._write([line])

    def conclude(self, *lines: str) -> None:
        """Add lines to the end of the summary, such as where a picture was written."""
        with self._lock:
            self._conclusion += map(text.printable, lines)

    def close(self) -> None:
        """Draw the last state, print the summary and stop; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            summary = [line for peer in self._peers.values() for line in peer.summary()]
            summary += self._conclusion
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                self._gone = True
        self._write(summary)

    def _take(self, peer_name: str, event: Event) -> list[str]:
        """Record an event; return the lines to print now."""
        kind = event["event"]
        if kind in ROW_KINDS and peer_name not in self._peers:
            self._peers[peer_name] = PeerView(peer_name)
        if peer_name in self._peers:
            self._peers[peer_name].apply(event)
        line = text.event_line(event)
        line = line and f"{text.clock_text(event)} {text.printable(peer_name)} {line}"
        if line and kind in MESSAGE_KINDS:
            self._messages.append(line)
        plain = line if self._live is None and self._due(peer_name, event) else None
        return [*([plain] if plain else []), *self._standing_lines(event)]

    def _standing_lines(self, event: Event) -> list[str]:
        """Return the lines that stay in sight, each shown once however many peers send it."""
        lines = []
        if event["event"] == "plan" and isinstance(event.get("text"), str):
            lines = ["plan:", *("  " + line.rstrip() for line in event["text"].splitlines())]
        elif address := text.join_address(event):
            lines = [f"join with: {self._config.join_command} {address}"]
        block = "\n".join(lines)
        if block in self._shown:
            return []
        self._shown.add(block)
        return lines

    def _due(self, peer_name: str, event: Event) -> bool:
        """Say whether an event is worth a plain line now: steps and rounds not too often."""
        kind = event["event"]
        if kind not in ("step", "round"):
            return True
        now_s = self._clock()
        last_s = self._last_line_s.get((peer_name, kind))
        ended = kind == "step" and event.get("step") == event.get("steps")
        failed = kind == "round" and event.get("outcome") in ("abandoned", "partial", "refused")
        if last_s is None or ended or failed or now_s - last_s >= self._config.plain_interval_s:
            self._last_line_s[peer_name, kind] = now_s
            return True
        return False

    def _write(self, lines: list[str]) -> None:
        """Print lines in full (above the live view if there is one), never broken to the width."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._writing:
            if self._gone or not lines:
                return
            block = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
            try:
                if self._live is not None:
                    self._console.print(Text(block), soft_wrap=True)
                else:
                    self._stream.write(block + "\n")
                    self._stream.flush()
            except OSError:
                self._gone = True

    def _view(self) -> Group:
        """Build the live view from the state as it is now."""
        with self._lock:
            header = self._header()
            states = [peer.state for peer in self._peers.values()]
            progress = [peer.progress_cells() for peer in self._peers.values()]
            memory = [peer.memory_cells() for peer in self._peers.values()]
            messages = [Text(line, no_wrap=True, overflow="ellipsis") for line in self._messages]
        styles = [STYLES.get(state, "") for state in states]
        if not states:
            return Group(header, *messages)
        width = self._console.width
        gap = 2 if width >= ROOMY_COLUMNS else 1
        if width >= WIDE_COLUMNS:
            rows = [left + right for left, right in zip(progress, memory, strict=True)]
            tables = [_table(PROGRESS_COLUMNS + MEMORY_COLUMNS, rows, styles, gap)]
        else:
            named = [[left[0], *right] for left, right in zip(progress, memory, strict=True)]
            tables = [
                _table(PROGRESS_COLUMNS, progress, styles, gap),
                _table(("peer", *MEMORY_COLUMNS), named, styles, gap),
            ]
        return Group(header, *tables, *messages)

    def _header(self) -> Text:
        all_started = (peer.newest("run_started") for peer in self._peers.values())
        started = next(filter(None, all_started), {})
        parameters = text.number(started, "parameters")
        parts = [
            text.words(started, "run") and f"run {text.words(started, 'run')}",
            text.words(started, "model") and f"model {text.words(started, 'model')}",
            parameters and f"{format_count(parameters)} parameters",
            text.words(started, "data") and f"data {text.words(started, 'data')}",
        ]
        line = ", ".join(["ATOM", *(part for part in parts if part)])
        return Text(line, style="bold", no_wrap=True, overflow="ellipsis")


PROGRESS_COLUMNS = ("peer", "step", "loss", "bits/byte", "tokens/s", "left", "peers", "round")
MEMORY_COLUMNS = ("device memory (peak of budget)", "link wait")


def _table(columns: tuple[str, ...], rows: list[list[str]], styles: list[str], gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        right = column not in ("peer", "left", "round", MEMORY_COLUMNS[0])
        table.add_column(
            column,
            justify="right" if right else "left",
            no_wrap=True,
            max_width=14 if column == "peer" else None,
        )
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*map(Text, row), style=style)
    return table
