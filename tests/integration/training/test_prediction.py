"""A run ends by saying what its steps took beside what its plan predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

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
