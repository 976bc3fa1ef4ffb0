"""An honest model, its text, and a trained run, which hostile cases are made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hugging_face_models import write_model, write_text


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("honest") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough text to train on."""
    return write_text(tmp_path_factory.mktemp("honest") / "text.txt")
