"""`atom export --push`: a dry run that writes nothing, and the same files for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atomtrain.cli.main import main
from tests.support.hugging_face_models import LLAMA, train_by_command, write_model, write_text

pytest.importorskip("transformers")


def test_dry_run_names_the_files_that_are_then_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "llama", LLAMA)
    text = write_text(Path("text.txt"))
    run = train_by_command(tmp_path / "llama", text, "mine", memory="4MiB", sequences=2, steps=1)
    sent: list[tuple[str, Path]] = []

    def take(_: Any, repository: str, export: Path) -> str:
        sent.append((repository, export))
        return "https://hub/somebody/model"

    monkeypatch.setattr("atomtrain.training.tools.hub.upload", take)
    command = ["export", str(run), "out", "--shard-size", "30KB", "--push", "somebody/model"]
    capsys.readouterr()

    def no_hub() -> None:
        raise AssertionError("a dry run asks nobody")

    monkeypatch.setattr("atomtrain.training.tools.hub.log_in", no_hub)
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert not Path("out").exists()
    assert not sent
    assert said[0] == "would be uploaded to somebody/model (private):"

    monkeypatch.setattr("atomtrain.training.tools.hub.log_in", lambda: "the hub")
    assert main(command) == 0
    assert sent == [("somebody/model", Path("out"))]
    assert "uploaded to https://hub/somebody/model (private)" in capsys.readouterr().out
    written = sorted(file.name for file in Path("out").iterdir())
    assert len([name for name in written if name.endswith(".safetensors")]) > 1
    assert [line.split()[0] for line in said[1:-1]] == written
    assert said[-1].startswith(f"{len(written)} files, about ")

    gguf = ["export", str(run), "m.gguf", "--push", "somebody/model", "--dry-run", "--gguf", "f16"]
    pytest.importorskip("gguf")
    assert main(gguf) == 0
    assert "m.gguf  " in capsys.readouterr().out
    assert not Path("m.gguf").exists()
    assert main([*command[:3], "--dry-run"]) == 2
    assert "give --push ORG/NAME" in capsys.readouterr().err
