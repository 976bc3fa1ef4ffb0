"""A step as a picture, whole and legible, and as a trace in the trace-event format."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import get_args

import pytest

from atomtrain.engine.devices.streams import Record, Stream
from atomtrain.errors import ConfigError
from atomtrain.planning.cost.timeline import Span, StreamName, VisitTime, step_spans
from atomtrain.planning.plan.shape import Phase, Shape, training_visits
from atomtrain.views.plans import step as picture
from atomtrain.views.plans.step import STREAMS, Account, Caption, step_picture, trace, write_trace

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


PREDICTED = (
    Span("load", "forward 0", 2.0, 2.5),
    Span("compute", "forward 0", 2.5, 4.0),
    Span("update", "turn 1-3", 4.0, 4.25),
)
MEASURED = (Span("compute", "forward 0", 100.0, 101.5),)


def test_every_span_is_a_complete_event_in_microseconds_from_the_step_s_beginning() -> None:
    events = trace([Account("predicted", PREDICTED)], {})["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in complete] == [
        ("forward 0", "load", 0.0, 0.5e6),
        ("forward 0", "compute", 0.5e6, 1.5e6),
        ("turn 1-3", "update", 2.0e6, 0.25e6),
    ]


def test_processes_are_accounts_and_threads_are_streams_with_names() -> None:
    accounts = [Account("predicted", PREDICTED), Account("measured", MEASURED)]
    events = trace(accounts, {})["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    assert names["process_name", 1, 0] == "predicted"
    assert names["process_name", 2, 0] == "measured"
    for event in events:
        if event["ph"] == "X":
            assert names["thread_name", event["pid"], event["tid"]] == event["cat"]
    # Both accounts begin at 0, so that they lie side by side.
    for process in (1, 2):
        assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == process) == 0


def test_a_trace_file_is_whole_json_with_the_keys_of_the_format(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    write_trace(target, [Account("predicted", PREDICTED)], {"model": "tiny"})
    read = json.loads(target.read_text())
    assert set(read) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert read["otherData"] == {"model": "tiny"}
    for event in read["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid"} <= set(event)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_trace(tmp_path / "missing" / "trace.json", [Account("predicted", PREDICTED)], {})


def test_a_stream_records_its_jobs_under_the_record_that_was_set_when_they_were_submitted() -> None:
    stream = Stream("load")
    first, second = Record(), Record()
    stream.submit(lambda: None, label="nobody looks")
    stream.record = first
    stream.submit(lambda: None, label="forward 0")
    first.label = "forward 1"
    stream.submit(lambda: None)
    stream.record = second
    stream.submit(lambda: None, label="turn 2")
    stream.record = None
    stream.submit(lambda: None)
    stream.close()
    assert [(span.stream, span.label) for span in first.spans()] == [
        ("load", "forward 0"),
        ("load", "forward 1"),
    ]
    assert [span.label for span in second.spans()] == ["turn 2"]
    for span in (*first.spans(), *second.spans()):
        assert span.end_s >= span.start_s


def test_a_job_that_fails_is_not_recorded() -> None:
    stream = Stream("load")
    stream.record = record = Record()

    def fail() -> None:
        raise ValueError("boom")

    event = stream.submit(fail)
    stream.close()
    assert event.is_done()
    assert record.spans() == ()


def test_streams_are_those_that_plans_predict() -> None:
    assert set(STREAMS) == set(get_args(StreamName))
