"""Traces of steps: the trace-event format, and what streams record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from atomtrain.engine.devices.streams import Record, Stream
from atomtrain.errors import ConfigError
from atomtrain.planning.cost.timeline import Span, StreamName
from atomtrain.views.plans.trace import STREAMS, Account, trace, write_trace

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
