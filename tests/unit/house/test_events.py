"""The event stream: written, read, and followed while another process writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.events import SILENT_S, Event, EventLog, EventTail, is_abandoned, read_events
from tests.support.waiting import PATIENCE_S


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read_events(path)]


def test_events_are_written_in_order_with_time_and_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "folder" / "events.jsonl")
    before_s = time.time()
    log.emit("run_started", run="psalms")
    log.emit("step", step=1, loss=2.5)
    log.close()
    first, second = read_events(tmp_path / "new" / "folder" / "events.jsonl")
    assert first["run"] == "psalms"
    assert (second["event"], second["step"], second["loss"]) == ("step", 1, 2.5)
    assert before_s <= first["time_s"] <= second["time_s"] <= time.time()


def test_listeners_hear_what_is_written_and_go_on_after_close(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    heard: list[Event] = []
    log.emit("early")
    log.subscribe(heard.append)
    log.emit("middle", size_bytes=3)
    log.close()
    log.close()
    log.emit("late")
    assert [event["event"] for event in heard] == ["middle", "late"]
    assert kinds(path) == ["early", "middle"]
    assert list(read_events(path))[1] == heard[0]


WRITER = """
import pathlib, sys, time
from atomtrain.events import EventLog
log = EventLog(pathlib.Path(sys.argv[1]))
log.emit("step")
print("written", flush=True)
time.sleep(600)
"""


def test_a_log_is_abandoned_when_its_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    long_ago_s = time.time() - SILENT_S - 1
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=-1) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        os.utime(path, (long_ago_s, long_ago_s))
        assert not is_abandoned(path), "however long it says nothing"
        writer.send_signal(signal.SIGKILL)
        writer.wait(PATIENCE_S)
    assert is_abandoned(path)
    os.utime(path)
    assert not is_abandoned(path), "somebody elsewhere may add to it"
    os.utime(path, (long_ago_s, long_ago_s))
    again = EventLog(path)
    assert not is_abandoned(path)
    again.close()
    assert is_abandoned(path)
    assert not is_abandoned(tmp_path / "gone.jsonl")


def test_without_a_path_only_listeners_are_told() -> None:
    log = EventLog()
    heard: list[Event] = []
    log.subscribe(heard.append)
    log.emit("step")
    log.close()
    assert len(heard) == 1


def test_an_event_that_cannot_be_written_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    with pytest.raises(TypeError):
        log.emit("bad", value=object())
    log.emit("good")
    log.close()
    assert path.read_text().count("\n") == 1
    assert kinds(path) == ["good"]


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in ("first", "second"):
        log = EventLog(path)
        log.emit(name)
        log.close()
    assert kinds(path) == ["first", "second"]
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_run_after_a_crash_loses_only_the_broken_line(tmp_path: Path, cut: int) -> None:
    """Wherever in the line the writer was killed, with or without its end of line."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("whole")
    log.emit("broken", text="x" * 60)
    log.close()
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    assert kinds(path) == ["whole"], "before the next run"
    again = EventLog(path)
    again.emit("run_started")
    again.close()
    # Killed just before the end of the line: then nothing of the event is missing.
    assert kinds(path) == ["whole", *(["broken"] if cut == 1 else []), "run_started"]


def test_two_events_merged_into_one_line_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"event": "step", "st{"event": "b"}\n{"event": "c"}\n')
    assert kinds(path) == ["a", "c"]


@given(st.lists(st.binary(max_size=30).filter(lambda junk: b"\n" not in junk), max_size=5))
def test_garbage_between_events_is_skipped(
    tmp_path_factory: pytest.TempPathFactory, junk: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "events.jsonl"
    lines = [line for piece in junk for line in (piece, b'{"event": "good"}')]
    path.write_bytes(b"\n".join([*lines, b"[" * 100_000, b"7", b'{"no": "kind"}', b"\xff", b""]))
    assert kinds(path) == ["good"] * len(junk)


def test_threads_never_interleave_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    heard: list[Event] = []
    log.subscribe(heard.append)

    def emit(thread: int) -> None:
        for number in range(100):
            log.emit("step", thread=thread, number=number, text="y" * 200)

    threads = [threading.Thread(target=emit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    log.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written == heard
    assert len(written) == 400
    for thread in range(4):
        assert [e["number"] for e in written if e["thread"] == thread] == list(range(100))


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
