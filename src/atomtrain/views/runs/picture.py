"""Draws the course of a run, for files and notebooks: loss and held-out bits per byte by peer."""

from __future__ import annotations

import base64
import bisect
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomtrain.engine.engine import Engine
from atomtrain.errors import DataError
from atomtrain.events import Event, EventTail
from atomtrain.files import replacing
from atomtrain.units import format_count, format_seconds
from atomtrain.views.plans.step import Caption, step_figure
from atomtrain.views.runs.event_text import number, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Colours that stay apart for colour-blind readers (Okabe and Ito), then told apart by line style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
MAX_POINTS = 2000
SMOOTHED_SHARE = 0.015


@dataclass
class PeerCourse:
    """One peer's course; lists of equal length belong together, by ascending step."""

    name: str
    run: str | None = None
    model: str | None = None
    steps: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Tokens after each step; `nan` where the peer did not say."""
    losses: list[float] = field(default_factory=list)
    """Training loss in nats per token; `nan` where it was not finite."""
    evaluated_steps: list[float] = field(default_factory=list)
    bits_per_byte: list[float] = field(default_factory=list)

    @property
    def has_tokens(self) -> bool:
        """Whether every step can be placed by its tokens."""
        return all(map(math.isfinite, self.tokens))

    def tokens_at(self, step: float) -> float:
        """Return the tokens after the last step up to `step`; 0 before the first."""
        index = bisect.bisect_right(self.steps, step)
        return self.tokens[index - 1] if index else 0.0


def read_course(name: str, events: Iterable[Event]) -> PeerCourse:
    """Return the course that a peer's events tell.

    A peer that resumes repeats the steps after its checkpoint: what it did before in their place
    is left out, since it is not part of the model's history.
    """
    course = PeerCourse(name)
    for event in events:
        step = number(event, "step")
        if event["event"] == "run_started":
            course.run, course.model = words(event, "run"), words(event, "model")
        elif step is None:
            continue
        elif event["event"] == "step":
            _drop_from(step, course.steps, course.tokens, course.losses)
            # An evaluation belongs to the state after its step: it goes when that step is redone.
            _drop_from(step, course.evaluated_steps, course.bits_per_byte)
            course.steps.append(step)
            course.tokens.append(_number_or_nan(event, "tokens_total"))
            course.losses.append(_number_or_nan(event, "loss"))
        elif event["event"] == "evaluation":
            _drop_from(step, course.evaluated_steps, course.bits_per_byte)
            course.evaluated_steps.append(step)
            course.bits_per_byte.append(_number_or_nan(event, "bits_per_byte"))
    return course


def loss_picture(event_files: Mapping[str, Path], target: Path) -> Path:
    """Draw the event files, by peer name, as a PNG picture; return `target`.

    The upper panel has the training loss of every step (light) and smoothed; the lower one, if
    there was an evaluation, the held-out bits per byte. Peers without a step are left out. The
    picture is written under a temporary name and then renamed, so `target` is always whole.

    Raises:
        DataError: no file has a single step in it.
    """
    courses = [read_course(name, EventTail(path).read()) for name, path in event_files.items()]
    courses = [course for course in courses if course.steps]
    if not courses:
        files = ", ".join(map(str, event_files.values())) or "no event file"
        raise DataError(f"{files}: no training step to draw; train at least one step first")
    figure = course_figure(courses)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    return target


def smooth(values: list[float], reach: int) -> list[float]:
    """Return for each value the mean of its neighbours up to `reach` places to either side.

    At the start, where losses fall steeply, fewer places count, equally many on both sides; at the
    end the places to the left still count in full, so that one last value does not bend the curve.
    `nan` is passed over, and stays where there is nothing else to average.
    """
    sums, counts = [0.0], [0]
    for value in values:
        known = math.isfinite(value)
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    smoothed = []
    for index in range(len(values)):
        left = min(reach, index)
        low, high = index - left, min(index + left + 1, len(values))
        known_values = counts[high] - counts[low]
        smoothed.append((sums[high] - sums[low]) / known_values if known_values else math.nan)
    return smoothed


def _drop_from(step: float, steps: list[float], *others: list[float]) -> None:
    index = bisect.bisect_left(steps, step)
    for values in (steps, *others):
        del values[index:]


def _number_or_nan(event: Event, key: str) -> float:
    value = number(event, key)
    return math.nan if value is None else value


def course_figure(courses: list[PeerCourse]) -> Figure:
    """Draw the courses of peers, each with at least one step."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    evaluated = any(any(map(math.isfinite, course.bits_per_byte)) for course in courses)
    by_tokens = all(course.has_tokens for course in courses)
    figure = Figure(figsize=(8, 6.5 if evaluated else 4.2), layout="constrained")
    panels = figure.subplots(2 if evaluated else 1, 1, sharex=True, squeeze=False)[:, 0]
    for index, course in enumerate(courses):
        colour = COLOURS[index % len(COLOURS)]
        style = LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
        _draw_loss(panels[0], course, by_tokens, {"color": colour, "linestyle": style})
        if evaluated:
            _draw_held_out(panels[1], course, by_tokens, {"color": colour, "linestyle": style})
    panels[0].set_ylabel("training loss (nats per token)")
    panels[-1].set_ylabel("held-out bits per byte" if evaluated else panels[0].get_ylabel())
    panels[-1].set_xlabel("tokens trained on" if by_tokens else "steps")
    panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    for panel in panels:
        panel.grid(color="0.9")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper right", ncols=1 + (len(courses) - 1) // 6)
    panels[0].set_title(_title(courses), loc="left", fontsize="medium", fontweight="bold")
    return figure


def _draw_loss(panel: Axes, course: PeerCourse, by_tokens: bool, look: dict[str, Any]) -> None:
    x = course.tokens if by_tokens else course.steps
    smoothed = smooth(course.losses, round(SMOOTHED_SHARE * len(course.losses)))
    stride = -(-len(x) // MAX_POINTS)
    last = slice(len(x) - 1, None)  # the end of the run is always in the picture
    raw: dict[str, Any] = {**look, "alpha": 0.25, "linewidth": 0.8, "linestyle": "-"}
    smooth_look: dict[str, Any] = {**look, "linewidth": 1.8, "label": course.name}
    for values, panel_look in ((course.losses, raw), (smoothed, smooth_look)):
        panel.plot(x[:-1:stride] + x[last], values[:-1:stride] + values[last], **panel_look)


def _draw_held_out(panel: Axes, course: PeerCourse, by_tokens: bool, look: dict[str, Any]) -> None:
    steps = course.evaluated_steps
    x = [course.tokens_at(step) for step in steps] if by_tokens else steps
    finite = [value for value in course.bits_per_byte if math.isfinite(value)]
    look = {**look, "marker": "o", "markersize": 3.5, "linewidth": 1.4}
    if finite:
        look["label"] = f"{course.name}: {finite[-1]:.3f}"
    panel.plot(x, course.bits_per_byte, **look)


def _title(courses: list[PeerCourse]) -> str:
    first = courses[0]
    run = f"run {first.run}" if first.run else "training run"
    peers = f"{len(courses)} peers" if len(courses) > 1 else None
    return ", ".join(part for part in (run, first.model, peers) if part)


_DPI = 100


class PlanView:
    """A plan: text in a terminal, the timeline of the predicted step in a notebook."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return self._engine.plan.describe()

    def _repr_html_(self) -> str:
        return image(self._repr_png_(), "The predicted step") + table(self._engine.plan.describe())

    def _repr_png_(self) -> bytes:
        plan = self._engine.plan
        facts = f"predicted: {format_seconds(plan.step_s)} a step, bound by {plan.bound}"
        caption = Caption(f"Plan for {self._engine.device_name}", facts)
        return _png(step_figure(self._engine.predicted_spans(), caption))


class History:
    """The losses of a training: numbers for programs, a picture in a notebook."""

    def __init__(
        self, losses: Sequence[float], evaluations: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.losses = tuple(losses)
        """Of each step."""
        self.evaluations = tuple(evaluations)
        """Step and loss of each evaluation."""

    @property
    def global_step(self) -> int:
        """Steps done, as `transformers.Trainer` calls them."""
        return len(self.losses)

    @property
    def training_loss(self) -> float:
        """Mean over all steps; NaN before the first."""
        return sum(self.losses) / len(self.losses) if self.losses else math.nan

    def __repr__(self) -> str:
        if not self.losses:
            return "no steps yet"
        held_out = f", held-out {self.evaluations[-1][1]:.4f}" if self.evaluations else ""
        return f"{len(self.losses)} steps, loss {self.losses[-1]:.4f}{held_out}"

    def _repr_html_(self) -> str:
        png = self._repr_png_()
        shown = "" if png is None else image(png, "The course of the loss")
        return shown + table("\n".join(f"{name}   {value}" for name, value in self._rows()))

    def _repr_png_(self) -> bytes | None:
        """Return the course of the loss as a picture; `None` before the first step."""
        if not self.losses:
            return None
        course = PeerCourse("training", losses=list(self.losses))
        course.steps = [float(step) for step in range(1, len(self.losses) + 1)]
        course.tokens = [float("nan")] * len(self.losses)
        figure = course_figure([course])
        panel = figure.axes[0]
        panel.set_ylabel("loss")  # of whatever is trained
        if self.evaluations:
            panel.plot(*zip(*self.evaluations, strict=True), "o-", color="0.2", label="held-out")
            panel.legend(frameon=False, loc="upper right")
        return _png(figure)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("steps", str(len(self.losses)))]
        rows += [("loss", f"{self.losses[-1]:.4f}")] if self.losses else []
        rows += [("held-out", f"{self.evaluations[-1][1]:.4f}")] if self.evaluations else []
        return rows


def _png(figure: Figure) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=_DPI)
    return target.getvalue()


def image(png: bytes, said: str) -> str:
    """Return a picture as HTML, with the text that stands for it.

    Notebooks that are given HTML and a picture of one thing show the HTML alone.
    """
    data = base64.b64encode(png).decode("ascii")
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(said)}">'


def table(lines: str) -> str:
    """Return lines of a name, spaces and a text as an HTML table."""
    rows = []
    for line in lines.splitlines():
        words, _, text = line.partition("  ")
        if not text:
            words, _, text = line.partition(" ")
        cells = (words, "th"), (text.strip(), "td")
        rows.append(
            "<tr>"
            + "".join(
                f'<{cell} style="text-align: left">{html.escape(content)}</{cell}>'
                for content, cell in cells
            )
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"
