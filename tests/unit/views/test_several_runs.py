"""Several runs on one page: named one by one, or by the folder that they lie in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from atomtrain.cli.main import main
from atomtrain.errors import ConfigError
from atomtrain.events import EventLog
from atomtrain.views.dashboard.source import FolderSource, RunsSource, source_of


def write(folder: Path, run: str, peer: str = "peer-0") -> Path:
    with contextlib.closing(EventLog(folder / run / peer / "events.jsonl")) as log:
        log.emit("step", step=1, loss=2.0)
    return folder / run


def runs_of(source: RunsSource | FolderSource) -> list[tuple[str, str]]:
    told = [message.body for message in source.poll() if message.kind == "curves"]
    return [(body["run"], body["peer"]) for body in told]


def test_a_folder_of_runs_shows_them_all_and_takes_in_new_ones(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", "peer-1")
    (tmp_path / "no-run").mkdir()
    source = source_of([tmp_path])
    assert isinstance(source, RunsSource)
    assert runs_of(source) == [("a", "peer-0"), ("b", "peer-1")]
    write(tmp_path, "c")
    write(tmp_path, "no-run")
    assert runs_of(source) == [("c", "peer-0"), ("no-run", "peer-0")]
    assert {message.body["run"] for message in source.snapshot()} == {"a", "b", "c", "no-run"}


def test_named_runs_and_those_of_one_name(tmp_path: Path) -> None:
    folders = [write(tmp_path / "x", "a"), write(tmp_path / "y", "a"), write(tmp_path / "z", "a")]
    source = source_of([*folders, folders[0]])
    assert isinstance(source, RunsSource)
    assert [run for run, _ in runs_of(source)] == ["a", "a (2)", "a (3)"]
    assert source.title == "a"


def test_one_run_stays_one_run(tmp_path: Path) -> None:
    folder = write(tmp_path, "a")
    for target in (folder, folder / "peer-0"):
        assert isinstance(source_of([target]), FolderSource)


def test_a_target_that_holds_no_run(tmp_path: Path) -> None:
    folder = write(tmp_path, "a")
    with pytest.raises(ConfigError, match="there is no folder"):
        source_of([folder, tmp_path / "gone"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no run"):
        source_of([folder, tmp_path / "empty"])


def test_an_address_is_shown_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, "a")
    assert main(["dashboard", str(folder), "mine@/ip4/192.0.2.1/tcp/1/p2p/x"]) == 2
    assert "is the address of a swarm, which is shown alone" in capsys.readouterr().err
