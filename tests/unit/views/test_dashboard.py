"""What views are fed with: thinned histories, followed folders, the table of peers, the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import ConfigError
from atomtrain.events import SILENT_S, EventLog
from atomtrain.views.dashboard.history import PeerHistory
from atomtrain.views.dashboard.source import FolderSource, Message, SwarmTable, clean


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "time_s": float(number), **fields}


def test_steps_that_are_repeated_replace_the_old_ones() -> None:
    history = PeerHistory()
    for number in (1, 2, 3, 4):
        history.apply(step(number, loss=1.0))
        history.apply({"event": "evaluation", "step": number, "loss": 3.0})
    history.apply({"event": "run_finished", "reason": "interrupted"})
    history.apply({"event": "run_started"})
    history.apply(step(3, loss=2.0))
    assert history.curves["step"].points("loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert history.curves["evaluation"].points("loss") == [(1, 3.0), (2, 3.0)]
    assert history.ended is None


def test_a_view_can_be_made_anew_from_a_history() -> None:
    history, again = PeerHistory(), PeerHistory()
    for event in (
        {"event": "run_started"}, {"event": "plan"}, step(1), {"event": "round", "round": 1},
        {"event": "warning", "message": "x"}, {"event": "heartbeat"}, {"event": "step"},
    ):  # fmt: skip
        history.apply(event)
    for event in history.events():
        again.apply(event)
    assert again.events() == history.events()
    assert {"event": "heartbeat"} not in history.events()


def test_what_was_fetched_is_no_point_of_a_rounds_curve() -> None:
    history = PeerHistory()
    history.apply({"event": "round", "round": 4, "outcome": "averaged", "duration_s": 2.0})
    history.apply({"event": "round", "round": 4, "outcome": "fetched", "duration_s": 9.0})
    assert history.curves["round"].points("duration_s") == [(4, 2.0)]
    assert len(history.rounds) == 2


def test_what_browsers_cannot_read_becomes_text() -> None:
    value = clean({"a": [math.nan, 1.0, (math.inf, None)], "b": "x", "c": True})
    assert value == {"a": ["nan", 1.0, ["inf", None]], "b": "x", "c": True}


def of_kind(messages: list[Message], kind: str) -> list[dict[str, Any]]:
    return [message.body for message in messages if message.kind == kind]


def test_a_run_is_followed_with_all_its_peers(tmp_path: Path) -> None:
    first = EventLog(tmp_path / "peer-0" / "events.jsonl")
    first.emit("step", step=1, loss=math.nan)
    source = FolderSource(tmp_path)
    events, curves = source.poll()
    assert (events.kind, events.body["run"], events.body["peer"]) == (
        "events", tmp_path.name, "peer-0",
    )  # fmt: skip
    assert events.body["events"][0]["loss"] == "nan"
    assert (curves.body["kind"], curves.body["x"], curves.body["fields"]) == ("step", [1], {})
    assert source.poll() == []
    EventLog(tmp_path / "peer-1" / "events.jsonl").emit("step", step=5, loss=3.0)
    first.emit("step", step=2, loss=1.5)
    first.emit("step", step=3, loss=1.0)
    told = source.poll()
    assert [body["peer"] for body in of_kind(told, "events")] == ["peer-0", "peer-1"]
    assert [e["step"] for e in of_kind(told, "events")[0]["events"]] == [3], "the last is enough"
    body = of_kind(told, "curves")[0]
    assert (body["from"], body["x"], body["fields"]["loss"]["mean"]) == (2, [2, 3], [1.5, 1])
    whole = of_kind(source.snapshot(), "curves")
    assert [body["x"] for body in whole] == [[1, 2, 3], [5]]
    alone = FolderSource(tmp_path / "peer-1")
    assert {message.body["peer"] for message in alone.poll()} == {"peer-1"}


def test_a_long_file_is_read_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.views.dashboard.source._MOST_READ_BYTES", 1000)
    with contextlib.closing(EventLog(tmp_path / "events.jsonl")) as log:
        for number in range(1, 101):
            log.emit("step", step=number, loss=1.0)
    source = FolderSource(tmp_path)
    found = [body["x"] for _ in range(20) for body in of_kind(source.poll(), "curves")]
    assert len(found) > 3
    assert [x for part in found for x in part] == [*range(1, 101)]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        FolderSource(tmp_path / "gone")
    with pytest.raises(ConfigError, match="holds no run"):
        FolderSource(tmp_path)


def test_the_table_tells_only_what_changed() -> None:
    table = SwarmTable()
    a, b = {"peer_id": "a", "steps": 1}, {"peer_id": "b", "steps": 1}
    (message,) = table.replace([a, b], 1.0, "me")
    assert message.body["rows"] == [a, b]
    (message,) = table.replace([{**a, "steps": 2}, "garbage", {}], 2.0, "me")
    assert message.body["rows"] == [{**a, "steps": 2}]
    assert message.body["gone"] == ["b"]
    assert table.replace([a], 1.5, "late") == [], "an older table is ignored"
    (message,) = table.snapshot()
    assert message.body["rows"] == [{**a, "steps": 2}]


def test_when_nobody_is_left_to_tell_nobody_is_said_to_train() -> None:
    table = SwarmTable()
    table.replace([{"peer_id": "a", "state": "training", "reachable": True}], 1.0, "me")
    (message,) = table.lose(2.0)
    assert message.body["rows"] == [{"peer_id": "a", "state": "unknown", "reachable": None}]


def test_peers_of_a_run_that_has_ended_train_no_more(tmp_path: Path) -> None:
    logs = {name: EventLog(tmp_path / name / "events.jsonl") for name in ("a", "b")}

    def tell(name: str, time_s: float) -> None:
        rows = [
            {"peer_id": peer, "is_self": peer == name, "state": "training", "reachable": True}
            for peer in ("a", "b", "elsewhere")
        ]
        (tmp_path / name / "swarm.json").write_text(json.dumps({"time_s": time_s, "peers": rows}))

    def rows() -> list[dict[str, Any]]:
        source.poll()
        (*_, told) = source.snapshot()
        found: list[dict[str, Any]] = told.body["rows"]
        return found

    def states() -> dict[str, str]:
        return {row["peer_id"]: row["state"] for row in rows()}

    for time_s, (name, log) in enumerate(logs.items()):
        log.emit("step", step=1)
        tell(name, float(time_s))
    source = FolderSource(tmp_path)
    assert set(states().values()) == {"training"}
    logs["b"].emit("run_finished", reason="completed")
    assert states() == {"a": "training", "b": "completed", "elsewhere": "training"}
    (row,) = (row for row in rows() if row["peer_id"] == "b")
    assert 0 <= time.time() - row["ended_s"] < 1000
    logs["a"].emit("peer_lost", reason="killed")
    assert states() == {"a": "lost", "b": "completed", "elsewhere": "unknown"}
    logs["a"].emit("run_started")
    tell("a", 2.0)
    assert states() == {"a": "training", "b": "completed", "elsewhere": "training"}


def test_a_peer_that_was_killed_is_lost_until_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "peer-0" / "events.jsonl"

    def lie_still() -> None:
        long_ago_s = time.time() - SILENT_S - 1
        os.utime(path, (long_ago_s, long_ago_s))

    log = EventLog(path)
    log.emit("step", step=1)
    source = FolderSource(tmp_path)
    assert len(of_kind(source.poll(), "events")) == 1
    lie_still()
    assert source.poll() == [], "a long step"
    log.close()  # as the kernel does for who is killed
    ((_, body),) = source.poll()
    assert [event["event"] for event in body["events"]] == ["peer_lost"]
    assert source.histories["peer-0"].ended == "lost"
    assert source.poll() == [], "told once"
    with contextlib.closing(EventLog(path)) as again:
        again.emit("run_started")
        source.poll()
        assert source.histories["peer-0"].ended is None
        again.emit("run_finished", reason="completed")
    lie_still()
    source.poll()
    assert source.histories["peer-0"].ended == "completed"
    assert source.poll() == []


@pytest.mark.parametrize("content", ["", "[]", '{"peers": 3}', '{"time_s": 1, "peers": {}}', "{"])
def test_a_damaged_table_is_ignored(tmp_path: Path, content: str) -> None:
    EventLog(tmp_path / "events.jsonl").emit("step", step=1)
    (tmp_path / "swarm.json").write_text(content)
    source = FolderSource(tmp_path)
    assert [message.kind for message in source.poll()] == ["events", "curves"]


class Fixed:
    """A source that has one message, and then one more for each poll."""

    title = "fixed"

    def __init__(self) -> None:
        self.polls = 0

    def poll(self) -> list[Message]:
        self.polls += 1
        return [Message("events", {"peer": "p", "events": [step(self.polls)]})]

    def snapshot(self) -> list[Message]:
        return [Message("events", {"peer": "p", "events": []})]


async def answered(app: Any, path: str, headers: dict[str, str] | None = None) -> Any:
    """Return status, headers and body that an application gives to a GET request."""
    sent: list[dict[str, Any]] = []
    path, _, query = path.partition("?")
    names = {"host": "127.0.0.1:80", **(headers or {})}
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "http_version": "1.1", "scheme": "http",
        "headers": [(k.encode(), v.encode()) for k, v in names.items()],
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)  # the visitor stays
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(part.get("body", b"") for part in sent[1:])


def get(app: Any, path: str, **headers: str) -> Any:
    return asyncio.run(answered(app, path, headers))


def test_the_page_is_served_with_headers_that_protect() -> None:
    server = pytest.importorskip("atomtrain.views.dashboard.server", exc_type=ImportError)
    pytest.importorskip("starlette")
    app = server.application(Fixed(), token=None, hosts=frozenset(("127.0.0.1",)))
    status, head, body = get(app, "/")
    assert (status, b"<h1>ATOM" in body) == (200, True)
    assert "script-src 'self'" in head["content-security-policy"]
    assert get(app, "/static/app.js")[0] == 200
    assert get(app, "/static/../server.py")[0] == 404
    assert get(app, "/", host="evil.example")[0] == 403, "names that point here from outside"


def test_a_token_is_asked_for() -> None:
    pytest.importorskip("starlette")
    from atomtrain.views.dashboard.server import COOKIE, application

    app = application(Fixed(), token="secret12", hosts=None)
    assert get(app, "/", host="any.example")[0] == 401
    assert get(app, "/stream")[0] == 401
    assert get(app, "/?token=wrong")[0] == 401
    assert get(app, "/?token=%FF")[0] == 401
    status, head, _ = get(app, "/?token=secret12")
    assert (status, head["location"]) == (303, "/")
    assert "HttpOnly" in head["set-cookie"]
    assert "samesite=strict" in head["set-cookie"].lower()
    assert get(app, "/", cookie=f"{COOKIE}=secret12")[0] == 200


def test_a_view_gets_all_that_is_known_and_then_what_is_new() -> None:
    from atomtrain.views.dashboard.server import Hub

    async def first(count: int) -> list[tuple[str, Any]]:
        hub = Hub(Fixed())
        polling = asyncio.create_task(hub.run())
        got = []
        async for text in hub.stream():
            name, data = text.strip().split("\n")
            got.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if len(got) == count:
                break
        polling.cancel()
        return got

    got = asyncio.run(first(5))
    assert [name for name, _ in got[:3]] == ["start", "events", "ready"]
    numbers = [body["events"][0]["step"] for _, body in got[3:]]
    assert numbers == list(range(numbers[0], numbers[0] + 2)), "nothing is missed or told twice"


def test_there_is_an_end_to_how_many_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    from atomtrain.views.dashboard import server

    monkeypatch.setattr(server, "_MOST_VIEWS", 0)
    app = server.application(Fixed(), token=None, hosts=None)
    status, _, body = get(app, "/stream")
    assert (status, b"too many visitors" in body) == (503, True)


def test_a_view_that_lags_behind_is_ended() -> None:
    from atomtrain.views.dashboard import server

    async def lag() -> int:
        hub = server.Hub(Fixed())
        stream = hub.stream()
        async for _ in stream:
            break  # it is known now, and reads no more
        await anext(stream)
        await anext(stream)
        for _ in range(server._MOST_WAITING + 1):
            hub._tell(Message("events", {}))
        return len([text async for text in stream])

    assert asyncio.run(lag()) == 0


def test_a_view_that_reads_no_more_still_counts() -> None:
    from atomtrain.views.dashboard import server

    async def views() -> list[int]:
        hub = server.Hub(Fixed())
        stream: Any = hub.stream()
        await anext(stream)
        for _ in range(server._MOST_WAITING + 1):
            hub._tell(Message("events", {}))
        found = [hub.views]
        await stream.aclose()
        return [*found, hub.views]

    assert asyncio.run(views()) == [1, 0]


def test_what_views_begin_with_is_made_once_until_there_is_news() -> None:
    from atomtrain.views.dashboard.server import Hub

    class Counting(Fixed):
        made = 0

        def poll(self) -> list[Message]:
            return super().poll() if self.polls < 1 else []

        def snapshot(self) -> list[Message]:
            self.made += 1
            return super().snapshot()

    async def made() -> int:
        hub = Hub(source)
        for _ in range(3):
            await anext(hub.stream())
        polling = asyncio.create_task(hub.run())
        while source.polls < 1:
            await asyncio.sleep(0)
        for _ in range(3):
            await anext(hub.stream())
        polling.cancel()
        return source.made

    source = Counting()
    assert asyncio.run(made()) == 2


def test_a_source_that_fails_is_told_of_and_polled_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atomtrain.views.dashboard import server

    class Failing(Fixed):
        def poll(self) -> list[Message]:
            if self.polls < 2:
                self.polls += 1
                raise ValueError("a strange file")
            return super().poll()

    async def first_news() -> str:
        hub = server.Hub(Failing())
        polling = asyncio.create_task(hub.run())
        got = [text async for text in until(hub)]
        polling.cancel()
        return got[-1]

    async def until(hub: server.Hub) -> AsyncIterator[str]:
        async for text in hub.stream():
            yield text
            if '"step":' in text:
                return

    monkeypatch.setattr(server, "_POLL_S", 0.0)
    assert asyncio.run(first_news()).startswith("event: events")
    assert caplog.messages == [
        "the page lacks something that is new: ValueError: a strange file"
    ], "once"


DEEP = "[" * 900 + "]" * 900
HOSTILE = (DEEP, "[]", "{}", "1e999", "NaN", "9" * 4299, "true", '"\\ud800"', "[null, 5]")


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("kind", ["run_started", "step", "round", "sample", "run_finished"])
def test_no_value_in_a_runs_files_stops_the_page(tmp_path: Path, kind: str, public: bool) -> None:
    from atomtrain.views.dashboard.public import PublicSource
    from atomtrain.views.dashboard.server import _sent

    fields = (
        "time_s", "step", "loss", "round", "fragment", "peer_ids", "members", "weights", "model",
        "reason", "prompt", "text",
    )  # fmt: skip
    plain = {"event": json.dumps(kind), "round": "1", "peer_ids": '["a"]', "members": '["A"]'}
    lines = [
        ",".join(f"{json.dumps(k)}: {v}" for k, v in {**plain, field: value}.items())
        for field in fields
        for value in HOSTILE
    ]
    text = "".join(f"{{{line}}}\n" for line in lines)
    (tmp_path / "events.jsonl").write_text(text + '{"event": "sample", "text": "the last"}\n')
    (tmp_path / "swarm.json").write_text(f'{{"time_s": 1, "peers": [{{"peer_id": {DEEP}}}]}}')
    source = FolderSource(tmp_path)
    shown = PublicSource(source) if public else source
    sent = "".join(map(_sent, [*shown.poll(), *shown.snapshot()]))
    assert "the last" in sent


def test_tokens_that_nobody_can_have_given_do_not_count() -> None:
    from atomtrain.views.dashboard.public import Leaders

    leaders = Leaders()
    for number in range(2):
        told = {"peer_ids": ["a"], "members": ["A"], "weights": [10**4299 if number else 5]}
        leaders.count({"event": "round", "round": number, **told})
    assert [row["accepted_tokens"] for row in leaders.rows()] == [5]
