"""Resuming: a run that was closed to strangers stays closed, and nobody splits off by mistake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.errors import ConfigError, SwarmError
from atomtrain.swarm.catchup.joining import WrongKeyError
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.setup import sources

PEER = "12D3KooWJkgyoePXTxr3gVF6FGYx8WZHwXwfMFuBc78jdBJHSeKX"
ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("the secret of this run")
    return path


def test_a_closed_run_is_not_opened_by_an_option_that_was_forgotten(
    key: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "list"
    listed.write_text(PEER)
    closed = sources.guards_of(TrainOptions(run="x", run_key=key, allow=listed))
    with pytest.raises(ConfigError, match="give --run-key FILE and --allow FILE again"):
        sources._check_guards(TrainOptions(run="x", resume=True), "x", closed)
    for options in (TrainOptions(run="x", run_key=key), TrainOptions(run="x", allow=listed)):
        sources._check_guards(options, "x", closed)
    sources._check_guards(TrainOptions(run="x", resume=True), "x", [])


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("error", [WrongKeyError("another key"), SwarmError("nobody answers")])
def test_who_has_a_key_and_meets_another_one_does_not_go_on_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: Path, error: SwarmError, has_key: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sources, "_join", fail)
    saved: Any = SimpleNamespace(meta={"swarm": {"known_addresses": [ADDRESS]}})
    options = TrainOptions(run="x", resume=True, run_key=key if has_key else None)
    if has_key and isinstance(error, WrongKeyError):
        with pytest.raises(WrongKeyError):
            sources._rejoin(options, "x", "peer-0", tmp_path / "x", saved)
    else:
        assert sources._rejoin(options, "x", "peer-0", tmp_path / "x", saved) is None
