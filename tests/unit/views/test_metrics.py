"""Numbers of a run for other programs: one table of names, and writers that never hold it up."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from atomtrain.errors import ConfigError
from atomtrain.events import EventLog
from atomtrain.metrics import writers
from atomtrain.metrics import writers as feeding
from atomtrain.metrics.names import (
    METRICS,
    PeerLabels,
    Target,
    for_local_peer,
    parse_target,
    parse_targets,
    table,
    values_of,
)
from atomtrain.metrics.writers import Exposition, MetricsFeed
from atomtrain.training.config.options import TrainOptions
from tests.support import ROOT
from tests.support.waiting import PATIENCE_S

STEP = {"event": "step", "step": 3, "loss": 2.5, "tokens_per_s": 10, "peers": True, "round": None}


def labels(folder: Path) -> PeerLabels:
    return PeerLabels('mi"ne\\', "peer-0", folder)


def test_an_event_tells_its_metrics() -> None:
    assert values_of(STEP) == {"steps": 3.0, "loss": 2.5, "tokens_per_s": 10.0}
    assert math.isnan(values_of({"event": "step", "loss": math.nan})["loss"])
    assert values_of({"event": "step", "step_s": math.inf}) == {}
    assert values_of({"event": "evaluation", "loss": 1.0}) == {"held_out_loss": 1.0}
    assert values_of({"event": "unheard of"}) == {}


def test_names_are_one_and_carry_their_units() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        for ending, unit in (("_bytes", "bytes"), ("tokens_per_s", "tokens/s")):
            assert not metric.name.endswith(ending) or metric.unit == unit, metric.name
        ends_in_seconds = metric.name.endswith("_s") and not metric.name.endswith("_per_s")
        assert ends_in_seconds == (metric.unit == "s"), metric.name


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert table() in page, "run python -m atombench.pages metrics"


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("tensorbord", "Did you mean 'tensorboard'?"),
        ("prometheus:x", "is not a port"),
        ("prometheus:70000", "is not a port"),
        ("", "Writers:"),
    ],
)
def test_a_wrong_target(text: str, needed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainOptions(metrics=(text,))
    assert needed in str(caught.value)


def test_targets() -> None:
    assert parse_target("prometheus") == Target(writer="prometheus", host="127.0.0.1", port=9100)
    assert parse_target("prometheus:0.0.0.0:1").host == "0.0.0.0"
    assert parse_target("wandb").place == "atom"
    assert for_local_peer("prometheus:9100", 2) == "prometheus:127.0.0.1:9102"
    assert for_local_peer("tensorboard:x", 2) == "tensorboard:x"
    with pytest.raises(ConfigError, match="twice"):
        parse_targets(["trackio", "trackio"])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'atomtrain\[wandb\]'"):
        MetricsFeed(parse_targets(["wandb"]), labels(tmp_path))


def test_prometheus_reads_the_newest_values(tmp_path: Path) -> None:
    exposition = Exposition("127.0.0.1", 0, labels(tmp_path))
    try:
        exposition.write(1, {"loss": 3.0, "tokens_total": 5.0})
        exposition.write(2, {"loss": math.nan})
        address = f"http://127.0.0.1:{exposition.port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        with pytest.raises(HTTPError) as caught:
            urllib.request.urlopen(f"{address}/other", timeout=PATIENCE_S)
        caught.value.close()
    finally:
        exposition.close()
    assert caught.value.code == 404
    assert text.splitlines() == [
        "# HELP atom_loss Training loss of the step. Unit: nats per token.",
        "# TYPE atom_loss gauge",
        'atom_loss{run="mi\\"ne\\\\",peer="peer-0"} NaN',
        "# HELP atom_tokens_total Tokens this peer trained on. Unit: tokens.",
        "# TYPE atom_tokens_total counter",
        'atom_tokens_total{run="mi\\"ne\\\\",peer="peer-0"} 5.0',
    ]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    exposition = Exposition("127.0.0.1", 0, labels(tmp_path))
    try:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{exposition.port}"):
            MetricsFeed(parse_targets([f"prometheus:{exposition.port}"]), labels(tmp_path))
    finally:
        exposition.close()


class Recorder:
    """A writer that notes what it gets, waits when told, and fails when told."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.go = threading.Event()
        self.go.set()
        self.fails = self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.go.wait(PATIENCE_S)
        if self.fails:
            raise OSError("the disk is full")
        self.written.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def make(*_: object) -> Recorder:
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(feeding, "open_writer", make)
    return made


def test_the_feed_writes_in_order_beside_training(
    tmp_path: Path, recorders: list[Recorder]
) -> None:
    feed = MetricsFeed(parse_targets(["tensorboard"]), labels(tmp_path))
    (recorder,) = recorders
    recorder.go.clear()
    events = EventLog()
    events.subscribe(feed.listen)
    for step in (1, 2):
        events.emit("step", step=step, loss=float(step))  # returns although the writer is stuck
    events.emit("round", contributors=2)
    recorder.go.set()
    feed.close()
    assert recorder.written == [
        (1, {"steps": 1.0, "loss": 1.0}),
        (2, {"steps": 2.0, "loss": 2.0}),
        (2, {"round_contributors": 2.0}),
    ]
    assert recorder.closed


def test_a_writer_that_fails_is_left_out(
    tmp_path: Path, recorders: list[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    feed = MetricsFeed(parse_targets(["tensorboard", "wandb"]), labels(tmp_path))
    recorders[0].fails = True
    for step in (1, 2):
        feed.listen({"event": "step", "step": step})
    feed.close()
    assert [step for step, _ in recorders[1].written] == [1, 2]
    assert caplog.text.count("no longer go to tensorboard") == 1


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed = MetricsFeed(parse_targets([f"tensorboard:{tmp_path}"]), PeerLabels("r", "p", tmp_path))
    feed.listen(STEP)
    feed.close()
    read = EventAccumulator(str(tmp_path / "r" / "p"))
    read.Reload()
    (point,) = read.Scalars("loss")
    assert (point.step, point.value) == (3, 2.5)


def test_what_wandb_complains_of_becomes_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsageError(Exception):
        pass

    def init(**_: Any) -> None:
        raise UsageError("No API key configured.\nLog in first.\n")

    module = SimpleNamespace(init=init, errors=SimpleNamespace(Error=UsageError))
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError) as raised:
        writers._Wandb("atom", PeerLabels("r", "p", tmp_path))
    assert str(raised.value) == (
        "--metrics wandb: No API key configured. Log in first; log in with 'wandb login', or set "
        "WANDB_MODE=offline"
    )


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    feed = MetricsFeed(parse_targets(["wandb"]), PeerLabels("r", "p", tmp_path))
    feed.listen(STEP)
    feed.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
