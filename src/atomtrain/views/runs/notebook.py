"""What notebooks show: the plan of a step, and the course of the loss, as pictures."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence

from atomtrain.engine.engine import Engine
from atomtrain.units import format_seconds
from atomtrain.views.plans.picture import Caption, step_figure
from atomtrain.views.runs.picture import PeerCourse, course_figure

_DPI = 100


class PlanView:
    """A plan: text in a terminal, the timeline of the predicted step in a notebook."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return self._engine.plan.describe()

    def _repr_html_(self) -> str:
        """Return the predicted step as a picture, with the plan as a table below it."""
        return image(self._repr_png_(), "The predicted step") + table(self._engine.plan.describe())

    def _repr_png_(self) -> bytes:
        """Return the predicted step as a picture."""
        plan = self._engine.plan
        facts = f"predicted: {format_seconds(plan.step_s)} a step, bound by {plan.bound}"
        caption = Caption(f"Plan for {self._engine.device_name}", facts)
        figure = step_figure(self._engine.predicted_spans(), caption)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=_DPI)
        return target.getvalue()


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
        """Return the course of the loss as a picture, with the newest figures below it."""
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
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=_DPI)
        return target.getvalue()

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("steps", str(len(self.losses)))]
        rows += [("loss", f"{self.losses[-1]:.4f}")] if self.losses else []
        rows += [("held-out", f"{self.evaluations[-1][1]:.4f}")] if self.evaluations else []
        return rows


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
