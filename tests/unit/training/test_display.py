"""Displays: plain lines, the live view on 80 columns, and what happens to odd events."""

from __future__ import annotations

import io
import math
import re
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from atomtrain.errors import ConfigError
from atomtrain.events import EventLog
from atomtrain.views.runs.display import Display, DisplayConfig
from atomtrain.views.runs.event_text import event_line, memory_text, printable
from tests.support.waiting import PATIENCE_S

Event = dict[str, Any]
MIB = 2**20
ADDRESS = "/ip4/192.168.1.17/tcp/41999/p2p/12D3KooWQ8ZxTt8mS6yJm4vZpN4c9yKQH4hYF2sTn3sZQ4vWcD1e"
KINDS = (
    *("run_started", "plan", "step", "evaluation", "round", "membership", "checkpoint", "sample"),
    *("warning", "run_finished", "peer_lost", "listening", "unknown"),
)


class Terminal(io.StringIO):
    """Takes what is written and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def started(**fields: Any) -> Event:
    event = {
        "event": "run_started",
        "run": "psalms",
        "model": "gpt3-small",
        "device": "cpu",
        "device_memory_bytes": 64 * MIB,
        "parameters": 12_300_000,
        "state_bytes": 312 * MIB,
        "steps": 20000,
        "tokens_per_step": 4096,
        "data": "kjv",
        "join_address": ADDRESS,
        "directory": "runs/psalms",
    }
    return {"time_s": 1e9, **event, **fields}


def step(number: int = 1200, **fields: Any) -> Event:
    event = {
        "event": "step",
        "step": number,
        "steps": 20000,
        "loss": 3.21449,
        "tokens_total": 4096 * number,
        "tokens_per_s": 12345.6,
        "link_wait_share": 0.0312,
        "device_peak_bytes": 58.1 * MIB,
        "device_budget_bytes": 64 * MIB,
        "state_bytes": 312 * MIB,
        "peers": 3,
        "round": 12,
        "time_left_s": 3599.0,
    }
    return {"time_s": 1e9 + number, **event, **fields}


def evaluation(**fields: Any) -> Event:
    return {"time_s": 1e9, "event": "evaluation", "step": 1200, "bits_per_byte": 1.6234, **fields}


def averaging(**fields: Any) -> Event:
    event = {"event": "round", "round": 12, "fragment": 2, "outcome": "averaged", "contributors": 3}
    return {"time_s": 1e9, **event, **fields}


def finished(**fields: Any) -> Event:
    event = {
        "event": "run_finished",
        "reason": "completed",
        "step": 20000,
        "loss": 2.5,
        "bits_per_byte": 1.25,
        "checkpoint": "runs/psalms/step-20000",
        "picture": "runs/psalms/loss.png",
        "duration_s": 700.0,
    }
    return {"time_s": 1e9, **event, **fields}


def plain(*events: tuple[str, Event], interval_s: float = 10.0) -> list[str]:
    """Return the lines that a display without a terminal prints, its summary left out."""
    stream = io.StringIO()
    display = Display(
        DisplayConfig(plain_interval_s=interval_s), stream=stream, clock=iter(range(999)).__next__
    )
    for name, event in events:
        display.update(name, event)
    return stream.getvalue().splitlines()


def screen(display: Display, width: int) -> list[str]:
    """Return the live view as it looks on a terminal of a given width."""
    page = io.StringIO()
    display._console = Console(file=page, width=width, force_terminal=False)
    display._console.print(display._view())
    return page.getvalue().splitlines()


def test_step_line_says_all_that_matters() -> None:
    (line,) = plain(("peer-1", step()))
    assert line.endswith(
        " peer-1 step 1200/20000, loss 3.214, 12.3k tokens/s, 59 min 59 s left, "
        "device 58.1 of 64.0 MiB, model state 312.0 MiB, link wait 3.1%, peers 3, round 12"
    )
    assert re.match(r"\d\d:\d\d:\d\d ", line)


def test_step_lines_are_paced_for_each_peer_and_the_last_is_never_left_out() -> None:
    events = [(name, step(number, steps=30)) for number in range(1, 31) for name in ("a", "b")]
    lines = plain(*events, interval_s=20.0)  # the clock goes on by one second an event
    shown = {name: [line.split()[3] for line in lines if f" {name} " in line] for name in "ab"}
    assert shown["a"] == ["1/30,", "11/30,", "21/30,", "30/30,"]
    assert shown["b"] == shown["a"]


def test_failed_rounds_are_shown_between_paced_ones() -> None:
    abandoned = averaging(outcome="abandoned", reason="peer-2 was lost", contributors=["a", "b"])
    lines = plain(("a", averaging()), ("a", averaging()), ("a", abandoned))
    assert len(lines) == 2
    assert lines[1].endswith("round 12 abandoned, fragment 2, peer-2 was lost; nothing is lost")


def test_events_worth_a_line_are_greppable() -> None:
    events: list[tuple[Event, str]] = [
        (started(), "started run psalms, model gpt3-small, 12.3M parameters, device cpu"),
        (evaluation(), "held-out bits per byte 1.623, step 1200"),
        (
            {"event": "checkpoint", "step": 5, "path": "x/y", "bytes": MIB, "duration_s": 1.5},
            "checkpoint x/y, step 5, 1.0 MiB, 1.50 s",
        ),
        ({"event": "membership", "peers": 2, "left": ["c"], "joined": []}, "peers 2, left: c"),
        ({"event": "sample", "prompt": "In the", "text": "beginning"}, 'sample "In the" -> begin'),
        ({"event": "warning", "message": "slow link"}, "warning: slow link"),
        ({"event": "stopping"}, "stopping: ends this step"),
        (finished(), "run completed, step 20000, loss 2.500, held-out bits per byte 1.250"),
        (
            {"event": "peer_lost", "reason": "killed by SIGKILL", "log": "a.log"},
            "lost: killed by SIGKILL, its output is in a.log",
        ),
    ]
    for event, text in events:
        assert text in plain(("a", event))[0]


def test_standing_lines_are_printed_in_full_and_once() -> None:
    plan = {"event": "plan", "text": "6 segments\nbound by compute"}
    lines = plain(("a", started()), ("b", started()), ("a", plan), ("b", plan))
    assert lines.count(f"join with: atom train --join {ADDRESS}") == 1
    assert [line for line in lines if line.startswith(("plan", "  "))] == [
        "plan:",
        "  6 segments",
        "  bound by compute",
    ]


def test_live_view_on_80_columns_cuts_no_number() -> None:
    with Display(stream=Terminal()) as display:
        for name in ("peer-0", "peer-1"):
            for event in (started(), step(12000), evaluation(), averaging()):
                display.update(name, event)
        lines = screen(display, 80)
    assert max(map(len, lines)) <= 80
    assert "run psalms, model gpt3-small, 12.3M parameters" in lines[0]
    columns = "peer-1 12000/20000 3.214 1.623 12.3k 59 min 59 s 3 12 averaged"
    assert columns in [" ".join(line.split()) for line in lines]
    memory = "peer-1 58.1 of 64.0 MiB, model state 312.0 MiB 3.1%"
    assert memory in [" ".join(line.split()) for line in lines]


def test_wide_live_view_has_one_row_a_peer() -> None:
    with Display(stream=Terminal()) as display:
        for name in ("peer-0", "peer-1"):
            display.update(name, step())
        lines = screen(display, 160)
    assert sum("peer-0" in line for line in lines) == 1
    assert "58.1 of 64.0 MiB, model state 312.0 MiB" in lines[2]


def test_lost_peer_stays_in_the_view_and_comes_back() -> None:
    def row(display: Display) -> str:
        return next(line for line in screen(display, 80) if line.startswith("peer-0 "))

    with Display(stream=Terminal()) as display:
        display.update("peer-0", step())
        display.update("peer-0", {"event": "peer_lost", "reason": "killed by SIGKILL"})
        assert " lost " in row(display)
        assert "killed by SIGKILL" in screen(display, 80)[-1]
        display.update("peer-0", started())
        display.update("peer-0", step())
        assert " lost " not in row(display)


def test_live_view_keeps_the_last_messages_only() -> None:
    with Display(DisplayConfig(messages=3), stream=Terminal()) as display:
        for number in range(9):
            display.note(f"message {number}")
        shown = [line.split(" ", 1)[1] for line in screen(display, 80)[1:]]
    assert shown == ["message 6", "message 7", "message 8"]


def test_terminal_gets_join_line_unbroken_and_summary_last() -> None:
    stream = Terminal()
    with Display(stream=stream) as display:
        display.update("a", started())
        display.update("a", finished())
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert f"join with: atom train --join {ADDRESS}" in output
    assert output.rstrip().endswith("runs/psalms/loss.png")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") > 0


def test_summary_says_what_came_out() -> None:
    stream = io.StringIO()
    with Display(stream=stream) as display:
        display.update("a", {"event": "sample", "prompt": "In the", "text": "beginning\nwas"})
        display.update("a", step())
        display.update("a", {"event": "sample", "prompt": "In the", "text": "beginning\nwas"})
        display.update("a", finished())
        display.update("b", step())
        display.update("b", {"event": "peer_lost", "reason": "killed by SIGKILL", "log": "b.log"})
        display.conclude("picture all.png")
        before = len(stream.getvalue())
    assert stream.getvalue()[before:].splitlines() == [
        "a: completed at step 20000",
        "  loss       2.500 nats per token",
        "  held-out   1.250 bits per byte",
        "  duration   11 min 40 s",
        "  checkpoint runs/psalms/step-20000",
        "  picture    runs/psalms/loss.png",
        '  sample     "In the" -> beginning was',
        "b: lost at step 1200",
        "  reason     killed by SIGKILL",
        "  loss       3.214 nats per token",
        "  output     b.log",
        "picture all.png",
    ]
    display.close()
    assert stream.getvalue().endswith("picture all.png\n")


def test_memory_units_are_named_once_where_they_agree() -> None:
    sizes = {"device_peak_bytes": 900 * 1024, "device_budget_bytes": 64 * MIB}
    assert memory_text(sizes) == "900.0 KiB of 64.0 MiB"
    assert memory_text({"state_bytes": MIB}) == "model state 1.0 MiB"
    assert memory_text({}) == ""


def test_losses_that_are_no_numbers_are_shown_as_such() -> None:
    assert "loss nan" in plain(("a", step(loss=math.nan)))[0]
    assert "left" not in plain(("a", step(time_left_s=math.inf)))[0]


@pytest.mark.parametrize("time_s", [1e300, -1e300, math.nan, 10**400, "noon", None])
def test_times_beyond_the_calendar_are_no_error(time_s: Any) -> None:
    assert re.match(r"\d\d:\d\d:\d\d a step 1200", plain(("a", step(time_s=time_s)))[0])


def test_text_from_others_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\n\u202ec") == "a\ufffd[31mb \ufffdc"
    sample = {"event": "sample", "prompt": "[/bold]", "text": "\x1b]0;title\x07"}
    for stream in (Terminal(), io.StringIO()):
        with Display(stream=stream) as display:
            display.update("\x1b[2Jpeer", step())
            display.update("\x1b[2Jpeer", sample)
        assert "\x1b]0;" not in stream.getvalue()
        assert "\x07" not in stream.getvalue()
        assert "[2Jpeer" in stream.getvalue()
        assert "\x1b[2Jpeer" not in stream.getvalue()
        assert '"[/bold]"' in stream.getvalue()


def test_output_that_cannot_hold_all_letters_gets_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Display(stream=stream) as display:
        display.update("a", {"event": "warning", "message": "Jérôme"})
    assert rb"J\xe9r\xf4me" in raw.getvalue()


def test_reader_that_goes_away_does_not_stop_training() -> None:
    class Closed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Closed()
    with Display(stream=stream) as display:
        display.update("a", step())
        display.update("a", finished())
    assert stream.writes == 1


def test_listener_and_threads() -> None:
    stream = io.StringIO()
    with Display(DisplayConfig(plain_interval_s=0.0), stream=stream) as display:
        logs = [EventLog() for _ in range(4)]

        def emit(log: EventLog) -> None:
            for number in range(50):
                log.emit("step", step=number, steps=50)

        for number, log in enumerate(logs):
            log.subscribe(display.listener(f"peer-{number}"))
        threads = [threading.Thread(target=emit, args=(log,)) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
        lines = stream.getvalue().splitlines()
    assert len(lines) == 200
    assert all(re.fullmatch(r"\S+ peer-\d step \d+/50", line) for line in lines)


@pytest.mark.parametrize(
    "wrong", [{"plain_interval_s": -1.0}, {"refreshes_per_s": 0.0}, {"messages": 0}]
)
def test_config_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DisplayConfig(**wrong)


FIELDS = (
    *("run", "model", "step", "steps", "loss", "bits_per_byte", "tokens_per_s", "time_left_s"),
    *("device_peak_bytes", "device_budget_bytes", "state_bytes", "link_wait_share", "peers"),
    *("round", "outcome", "contributors", "duration_s", "joined", "left", "path", "prompt"),
    *("text", "message", "reason", "join_address", "address", "time_s", "parameters", "log"),
)
VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    *(st.lists(st.text(max_size=5), max_size=3), st.just(10**400), st.just({})),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(FIELDS), VALUES)),
        max_size=6,
    )
)
def test_no_event_whatever_its_fields_is_an_error(events: list[tuple[str, Event]]) -> None:
    with Display(stream=io.StringIO()) as display:
        for kind, fields in events:
            event = {**fields, "event": kind}
            display.update("a", event)
            line = event_line(event)
            assert line is None or line.isprintable()
        assert screen(display, 80)[0].startswith("ATOM")
