"""In a notebook, how far a training is and the course of its loss, renewed while it goes on."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from atomtrain.training.trainer.callbacks import Callback, Course
from atomtrain.units import format_seconds
from atomtrain.views.runs.picture import History

_EVERY_S = 2.0
_MOST_SHARE = 0.02
"""Of the time may go into drawing."""


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel; a terminal's IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Inline(Callback):
    """Shows the training below the notebook's cell."""

    def __init__(self) -> None:
        self._display: Any = None
        self._due_s = 0.0
        self._began: tuple[int, float] | None = None
        """Step and time after the first step of this call: that one takes longer."""

    def on_train_begin(self, trainer: Any, course: Course) -> None:
        self._display, self._began, self._due_s = None, None, 0.0

    def on_step_end(self, trainer: Any, course: Course, loss: float) -> None:
        now_s = time.monotonic()
        self._began = self._began or (course.step, now_s)
        if now_s >= self._due_s:
            self._show(course)
            took_s = time.monotonic() - now_s
            self._due_s = now_s + max(_EVERY_S, took_s / _MOST_SHARE)

    def on_train_end(self, trainer: Any, course: Course) -> None:
        self._show(course)

    def _show(self, course: Course) -> None:
        """Draw the losses so far, in the place of what was drawn before."""
        from IPython.display import HTML, display

        shown = HTML(
            f"<p>{html.escape(self._line(course))}</p>"
            f"{History(course.losses, course.evaluations)._repr_html_()}"
        )
        if self._display is None:
            self._display = display(shown, display_id=True)
        else:
            self._display.update(shown)

    def _line(self, course: Course) -> str:
        line = f"step {course.step} of {course.steps}"
        first, since_s = self._began or (course.step, 0.0)
        if course.step == first or course.step >= course.steps:
            return line
        step_s = (time.monotonic() - since_s) / (course.step - first)
        left_s = step_s * (course.steps - course.step)
        return f"{line}, {format_seconds(step_s)} a step, {format_seconds(left_s)} left"
