"""The picture of a step: whole, and legible for few segments and for many."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atomtrain.errors import ConfigError
from atomtrain.planning.cost.timeline import Span, VisitTime, step_spans
from atomtrain.planning.plan.schedule import Phase, training_visits
from atomtrain.planning.plan.shape import Shape
from atomtrain.views.plans import step as picture
from atomtrain.views.plans.step import Caption, step_picture

PNG = b"\x89PNG\r\n\x1a\n"
CAPTION = Caption("tiny on a GPU", "1 s for 64 tokens")


def spans_of(layers: int) -> list[Span]:
    shape = Shape(tuple(range(layers)), tuple(range(layers + 1)), 2, 1)
    visits = training_visits(shape)
    times = [
        VisitTime(1.0 if v.phase is Phase.FORWARD else 3.0, 0.5, 0.5, 0.7, 0.1, 0.1) for v in visits
    ]
    return step_spans(visits, times)


def texts(spans: list[Span]) -> list[str]:
    """Return what is written into the bars."""
    panel = picture.step_figure(spans, CAPTION).axes[0]
    return [text.get_text() for text in panel.texts]


@pytest.mark.parametrize("layers", [1, 4, 98])
def test_the_picture_is_a_whole_png(tmp_path: Path, layers: int) -> None:
    target = step_picture(spans_of(layers), CAPTION, tmp_path / "plan.png")
    assert target.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_rows_are_the_streams_that_work_with_their_busy_share() -> None:
    panel = picture.step_figure(spans_of(4), CAPTION).axes[0]
    rows = [label.get_text().split("\n")[0] for label in panel.get_yticklabels()]
    assert rows == ["update", "unload", "save", "compute", "fetch", "load"]
    shares = [text for text in texts(spans_of(4)) if text.endswith("%")]
    assert len(shares) == len(rows)
    bare = [span for span in spans_of(4) if span.stream not in ("fetch", "save")]
    rows = [
        label.get_text().split("\n")[0]
        for label in picture.step_figure(bare, CAPTION).axes[0].get_yticklabels()
    ]
    assert rows == ["update", "unload", "compute", "load"]


def test_few_segments_carry_their_layers_and_many_do_not() -> None:
    written = texts(spans_of(4))
    assert written.count("3") >= 2  # the turn: computed, and more
    assert {"0", "1", "2"} <= set(written)
    assert not any(text.isdigit() for text in texts(spans_of(98)))


def test_neighbours_on_the_compute_row_differ_in_colour() -> None:
    shades = picture._shades(spans_of(6))
    for phase in ("forward", "backward"):
        own = [shades[f"{phase} {layer}"] for layer in range(5)]
        assert all(a != b for a, b in itertools.pairwise(own))


def test_one_row_s_busy_share_counts_overlaps_once() -> None:
    spans = [Span("save", "a", 0.0, 2.0), Span("save", "b", 1.0, 3.0), Span("save", "c", 5.0, 6.0)]
    assert picture._covered_s(spans) == 4.0


@pytest.mark.parametrize(
    ("length_s", "unit"),
    [(5e-4, "microseconds"), (1.0, "milliseconds"), (60.0, "seconds"), (3600.0, "minutes"),
     (1e5, "hours")],
)  # fmt: skip
def test_the_axis_has_a_unit_that_fits(length_s: float, unit: str) -> None:
    scale, name = picture._unit(length_s)
    assert name == unit
    assert 1 <= scale * length_s <= 2000


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        step_picture(spans_of(2), CAPTION, tmp_path / "missing" / "plan.png")
