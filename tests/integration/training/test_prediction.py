"""Predictions: a run says how good its own was, and makes a better one once others are gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.engine import replanning
from atomtrain.engine.calibration import profiling
from atomtrain.events import EVENTS_FILE, read_events
from tests.support.hugging_face_models import UNTIED, train_by_command, write_model, write_text

pytest.importorskip("transformers")


@pytest.mark.parametrize(("steps", "lines"), [(8, 1), (6, 0)])
def test_a_run_tells_once_how_good_its_prediction_was(
    steps: int,
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)
    run = train_by_command(folder, text, "mine", memory="2MiB", sequences=2, steps=steps)
    assert capsys.readouterr().out.count("than the predicted") == lines
    found = [e for e in read_events(run / EVENTS_FILE) if e["event"] == "prediction"]
    assert len(found) == lines
    for event in found:
        assert event["step_s"] > 0
        assert event["predicted_step_s"] > 0
        assert event["profiles_anew"] is False, "nothing was measured"


def test_a_run_measures_again_when_the_others_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine is crowded while the run begins; then it is not, and nothing else changes."""
    monkeypatch.chdir(tmp_path)
    folder, text = tmp_path / "llama", write_text(tmp_path / "text.txt")
    write_model(folder, UNTIED)

    def run(name: str) -> list[dict[str, Any]]:
        peer = train_by_command(
            folder, text, name, "--no-profile=false", memory="2MiB", sequences=2, steps=4
        )
        return [dict(event) for event in read_events(peer / EVENTS_FILE)]

    def told(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
        return [event for event in events if event["event"] == kind]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = iter([0.7, 0.7])  # of the machine and of the layers
    watch = SimpleNamespace(crowded_share=lambda: next(others, 0.01))
    for module in (profiling, replanning):
        monkeypatch.setattr(module, "Watch", lambda: watch)
        monkeypatch.setattr(module, "crowded_now", lambda: 0.0)
    monkeypatch.setattr(replanning, "_WATCHED_S", 0.0)
    crowded = run("crowded")
    assert "while other programs had 70% of its processor" in capsys.readouterr().out
    (again,) = told(crowded, "planned_again")
    first, second = told(crowded, "plan")
    assert again["predicted_before_s"] == first["predicted_step_s"]
    assert again["predicted_step_s"] == second["predicted_step_s"]
    quiet = run("quiet")
    assert told(quiet, "planned_again") == []
    losses = [[event["loss"] for event in told(events, "step")] for events in (crowded, quiet)]
    assert losses[0] == losses[1]
