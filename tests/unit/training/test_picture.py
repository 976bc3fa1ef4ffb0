"""The loss picture: what is read from events, and that the file is whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import DataError
from atomtrain.views.runs import picture
from atomtrain.views.runs.picture import loss_picture, read_course, smooth

Event = dict[str, Any]
PNG = b"\x89PNG\r\n\x1a\n"


def step(number: int, loss: float | None = 2.0, **fields: Any) -> Event:
    return {"event": "step", "step": number, "loss": loss, "tokens_total": 100 * number, **fields}


def evaluation(number: int, bits: float = 1.5) -> Event:
    return {"event": "evaluation", "step": number, "bits_per_byte": bits}


def write(path: Path, events: list[Event]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def size_pixels(png: bytes) -> tuple[int, int]:
    """Return width and height from the header of a PNG file."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_picture_of_several_peers_is_a_whole_png(tmp_path: Path) -> None:
    files = {
        "a": write(tmp_path / "a", [evaluation(0), step(1), step(2), evaluation(2), step(3)]),
        "b": write(tmp_path / "b", [step(1, math.nan), step(2, None), step(3, math.inf)]),
        "never started": tmp_path / "missing",
    }
    target = loss_picture(files, tmp_path / "new" / "loss.png")
    assert target == tmp_path / "new" / "loss.png"
    assert target.read_bytes().startswith(PNG)
    assert [path.name for path in target.parent.iterdir()] == ["loss.png"]


def test_evaluations_get_a_panel_of_their_own(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare", [step(1), step(2)])
    evaluated = write(tmp_path / "evaluated", [step(1), step(2), evaluation(2)])
    heights = [
        size_pixels(loss_picture({"a": events}, tmp_path / "loss.png").read_bytes())[1]
        for events in (bare, evaluated)
    ]
    assert heights[1] > heights[0]


@pytest.mark.parametrize("events", [None, [], [evaluation(0)], [{"event": "step", "loss": 1.0}]])
def test_nothing_to_draw_is_said(tmp_path: Path, events: list[Event] | None) -> None:
    path = tmp_path / "events.jsonl"
    if events is not None:
        write(path, events)
    with pytest.raises(DataError, match=r"events\.jsonl: no training step to draw"):
        loss_picture({"a": path}, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_old_picture_survives_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = write(tmp_path / "events.jsonl", [step(1)])
    target = tmp_path / "out" / "loss.png"
    whole = loss_picture({"a": events}, target).read_bytes()

    class FullDisk:
        def savefig(self, path: Path, **_: object) -> None:
            path.write_bytes(PNG)
            raise OSError("no space left on device")

    monkeypatch.setattr(picture, "course_figure", lambda courses: FullDisk())
    with pytest.raises(OSError, match="no space"):
        loss_picture({"a": events}, target)
    assert target.read_bytes() == whole
    assert [path.name for path in target.parent.iterdir()] == ["loss.png"]


def test_pyplot_is_not_touched(tmp_path: Path) -> None:
    from matplotlib import _pylab_helpers

    loss_picture({"a": write(tmp_path / "a", [step(1)])}, tmp_path / "loss.png")
    assert _pylab_helpers.Gcf.get_all_fig_managers() == []


def test_resumed_peer_shows_the_steps_that_its_model_has_seen() -> None:
    before = [step(1, 9.0), step(2, 8.0), evaluation(2, 3.0), step(3, 7.0), evaluation(3, 2.0)]
    after = [{"event": "run_started", "run": "r"}, step(3, 6.0), evaluation(3, 1.0), step(4, 5.0)]
    course = read_course("a", [*before, *after])
    assert course.steps == [1, 2, 3, 4]
    assert course.losses == [9.0, 8.0, 6.0, 5.0]
    assert (course.evaluated_steps, course.bits_per_byte) == ([2, 3], [3.0, 1.0])
    assert course.run == "r"


def test_evaluations_are_placed_by_the_tokens_of_their_step() -> None:
    course = read_course("a", [evaluation(0), step(10), step(20)])
    assert [course.tokens_at(at) for at in (0, 10, 15, 20, 99)] == [0, 1000, 1000, 2000, 2000]
    assert course.has_tokens
    assert not read_course("a", [step(1, tokens_total=None)]).has_tokens


def test_smoothing_neither_lags_nor_loses_values() -> None:
    line = [float(value) for value in range(20)]
    assert smooth(line, 3)[:17] == line[:17]  # a straight line stays where it is
    assert smooth(line, 3)[-1] == sum(line[16:]) / 4
    assert smooth(line, 0) == line
    assert smooth([], 3) == []


def test_smoothing_passes_over_values_that_are_not_numbers() -> None:
    smoothed = smooth([math.nan, 2.0, math.nan, 4.0, math.nan], 1)
    assert math.isnan(smoothed[0])
    assert smoothed[1:] == [2.0, 3.0, 4.0, 4.0]
