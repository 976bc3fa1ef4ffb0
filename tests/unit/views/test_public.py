"""The page for anybody: what it gets, byte for byte, has nothing that it must not show."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.views import DashboardOptions, _source
from atomtrain.views.dashboard.public import Leaders, PublicSource
from atomtrain.views.dashboard.server import Hub
from atomtrain.views.dashboard.source import FolderSource, Message
from tests.support.dashboard_run import STEPS, rows, tell_step, write_run, write_swarm

SECRETS = (
    "192.0.2.", "/ip4", "p2p", "secret", "/home/", "token=", "emulated", "segments",
    "cannot be trusted", "made up", "not finite", "books", "events.jsonl",
)  # fmt: skip
"""Parts of addresses, paths, tokens, plans, devices and messages that the run's files hold."""
FIELDS = {
    "about": {
        "run", "peer", "model", "parameters", "step", "steps", "tokens_total", "loss", "time_s",
        "ended", "ended_s",
    },
    "curves": {"run", "peer", "kind", "from", "every", "x", "fields"},
    "leaders": {"run", "rows"},
    "samples": {"run", "rows"},
}  # fmt: skip
LEADER = {"peer", "name", "accepted_tokens", "rounds", "state"}
SAMPLE = {"peer", "step", "time_s", "prompt", "text"}
CURVES = {"loss", "tokens_per_s", "bits_per_byte"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose files hold what nobody else must see, in every event that could."""
    folder = tmp_path / "secret-parent" / "mine"
    logs = write_run(folder)
    log = logs["peer-0"]
    log.emit(
        "run_started", run="mine", peer="peer-0", model="/home/me/models/llama", steps=STEPS,
        parameters=7, device="emulated", data="books/*.txt", directory=str(folder / "peer-0"),
        join_address="mine@/ip4/192.0.2.1/tcp/4001/p2p/secret",
    )  # fmt: skip
    log.emit("checkpoint", step=1, path="/home/me/secret", bytes=1)
    log.emit("listening", address="/ip4/192.0.2.1/secret")
    log.emit("warning", message="GET /?token=secret from 192.0.2.1")
    tell_step(log, STEPS + 1, random.Random(1))
    log.emit(
        "run_finished", reason="failed at /home/me", step=STEPS + 1, checkpoint="/home/me/secret",
        picture="/home/me/secret.png",
    )  # fmt: skip
    return folder


def check(messages: list[Message]) -> set[str]:
    """Check that messages have the public fields and no secret; return their kinds."""
    for kind, body in messages:
        text = json.dumps(body)
        assert [secret for secret in SECRETS if secret in text] == [], (kind, text[:300])
        assert set(body) <= FIELDS[kind], kind
        for row in body.get("rows", ()):
            assert set(row) == (LEADER if kind == "leaders" else SAMPLE)
        if kind == "curves":
            assert set(body["fields"]) <= CURVES
            assert body["kind"] in ("step", "evaluation")
    return {kind for kind, _ in messages}


def test_nothing_private_is_sent(folder: Path) -> None:
    private = FolderSource(folder)
    text = json.dumps([message.body for message in private.poll()])
    missing = [secret for secret in SECRETS if secret not in text]
    assert missing == ["events.jsonl"], "the run does hold the others"
    source = PublicSource(FolderSource(folder))
    assert check(source.poll()) == set(FIELDS)
    assert check(source.snapshot()) == set(FIELDS)
    write_swarm(folder / "peer-0", rows(["peer-0", "peer-1", "new"]))
    assert check(source.poll()) == {"leaders"}
    assert source.poll() == []


def test_a_visitor_gets_only_that(folder: Path) -> None:
    async def first_bytes() -> str:
        hub = Hub(source)
        got = []
        async for text in hub.stream():
            got.append(text)
            if text.startswith("event: ready"):
                return "".join(got)
        raise AssertionError

    source = _source(DashboardOptions(target=(str(folder),), public=True))
    source.poll()
    sent = asyncio.run(first_bytes())
    assert [secret for secret in SECRETS if secret in sent] == []
    assert '"title":"mine"' in sent
    assert "a night 2" in sent


def test_what_it_says_is_right(folder: Path) -> None:
    source = PublicSource(FolderSource(folder))
    source.poll()
    told = source.snapshot()
    (leaders,) = (body["rows"] for kind, body in told if kind == "leaders")
    # Four rounds, that three peers tell of, in which each of them gave 30 steps.
    assert [(row["name"], row["accepted_tokens"], row["rounds"]) for row in leaders] == [
        (f"peer-{index}", 4 * 30 * 256, 4) for index in range(3)
    ]
    about = next(body for kind, body in told if kind == "about" and body["peer"] == "peer-0")
    assert (about["model"], about["step"], about["ended"]) == ("llama", STEPS + 1, "finished")
    assert time.time() - about["ended_s"] < 1000
    (samples,) = (body["rows"] for kind, body in told if kind == "samples")
    assert [row["text"] for row in samples] == ["a night 0", "a night 1", "a night 2"]
    losses = [body for kind, body in told if kind == "curves" and body["kind"] == "step"]
    assert [len(body["x"]) for body in losses] == [STEPS + 1, STEPS, STEPS]


def round_of(**fields: Any) -> dict[str, Any]:
    return {
        "event": "round", "round": 1, "fragment": 0, "peer_ids": ["a", "b"], "members": ["A", "B"],
        "weights": [10, 30], **fields,
    }  # fmt: skip


def test_leaders_are_those_whose_tokens_were_accepted() -> None:
    leaders = Leaders()
    for event in (
        round_of(), round_of(), round_of(round=2, weights=[50, "many"]),
        round_of(round=3, peer_ids=["a"]), round_of(round=4, peer_ids=None), {"event": "round"},
        round_of(round=5, weights=None),
    ):  # fmt: skip
        leaders.count(event)
    assert [(row["name"], row["accepted_tokens"], row["rounds"]) for row in leaders.rows()] == [
        ("A", 60, 3), ("B", 30, 3),
    ]  # fmt: skip


def test_what_a_peer_says_of_itself_does_not_count() -> None:
    leaders = Leaders()
    leaders.hear(
        [{"peer_id": "a", "name": "A"}, {"peer_id": "liar", "name": "L", "tokens": 10**12,
          "accepted_tokens": 10**12, "rounds": 99, "tokens_per_s": 1e9}]
    )  # fmt: skip
    leaders.count(round_of())
    told = leaders.rows()
    assert [row["name"] for row in told] == ["B", "A", "L"]
    assert told[2] == {
        "peer": "liar", "name": "L", "state": None, "accepted_tokens": None, "rounds": 0
    }  # fmt: skip


def test_names_and_texts_have_an_end() -> None:
    leaders = Leaders()
    leaders.hear([{"peer_id": "x" * 99, "name": "n" * 999, "state": "left\n/ip4"}])
    (row,) = leaders.rows()
    assert (len(row["name"]), len(row["peer"]), row["state"]) == (60, 8, None)
