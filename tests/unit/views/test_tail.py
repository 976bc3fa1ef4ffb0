"""Following an event file that grows, breaks off and starts again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.events import EventLog, EventTail


def test_reads_what_was_added_since_the_last_call(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    log = EventLog(path)
    log.emit("step", step=1)
    assert [event["step"] for event in tail.read()] == [1]
    assert tail.read() == []
    log.emit("step", step=2)
    log.emit("step", step=3)
    log.close()
    assert [event["step"] for event in tail.read()] == [2, 3]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    path.write_bytes(
        '{"event": "sample", "text": "caf\N{LATIN SMALL LETTER E WITH ACUTE}'.encode()[:-1]
    )
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(b'\xa9"}\n')
    assert [event["text"] for event in tail.read()] == ["caf\N{LATIN SMALL LETTER E WITH ACUTE}"]
    assert tail.skipped == 0


def test_line_broken_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "step", "st{"event": "run_started"}\n{"event": "step", "step": 7}\n')
    tail = EventTail(path)
    assert [event["step"] for event in tail.read()] == [7]
    assert tail.skipped == 1


def test_starts_behind_what_is_there_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "old"}\n')
    tail = EventTail(path, from_end=True)
    with path.open("a") as file:
        file.write('{"event": "new"}\n')
    assert [event["event"] for event in tail.read()] == ["new"]


def test_file_that_was_started_afresh_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": "b"}\n')
    tail = EventTail(path)
    assert len(tail.read()) == 2
    path.write_text('{"event": "c"}\n')
    assert [event["event"] for event in tail.read()] == ["c"]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_skipped_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("tail") / "events.jsonl"
    path.write_bytes(garbage + b'\n{"event": "step"}\n' + b"[" * 100_000 + b"\n")
    tail = EventTail(path)
    assert tail.read()[-1]["event"] == "step"
    assert tail.skipped >= 1


def test_a_line_without_an_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atomtrain.events._MOST_LINE_BYTES", 100)
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "step", "x": "' + "a" * 1000 + '"}\n{"event": "next"}\n')
    tail = EventTail(path)
    found = []
    for _ in range(30):
        found += tail.read(50)
        assert len(tail._rest) <= 150
    assert [event["event"] for event in found] == ["next"]
    assert tail.skipped == 1


def test_an_event_nested_deeper_than_any_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    deep = "[" * 20 + "]" * 20
    path.write_text(f'{{"event": "a", "x": {deep}}}\n{{"event": "b", "x": [[[{{"y": [1]}}]]]}}\n')
    tail = EventTail(path)
    assert [event["event"] for event in tail.read()] == ["b"]
    assert tail.skipped == 1
