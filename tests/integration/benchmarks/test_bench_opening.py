"""`atom bench opening`, beside a version that is the same. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from atombench.common import BenchmarkOptions
from atombench.engine import opening
from atombench.engine.opening import OpeningSetup
from atomtrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_two_versions_are_measured_with_one_model() -> None:
    setup = OpeningSetup(layers=2, width=16, inner=32, heads=2, key_heads=1, vocabulary=64, turns=1)
    result = opening.run(BenchmarkOptions(beside=ROOT), setup)
    beside = result["beside"]
    assert result["loss"] == beside["loss"]
    whole, before = (each["open_s"] + each["first_step_s"] for each in (result, beside))
    assert result["ratio"] == pytest.approx(whole / before)


def test_a_folder_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no src/atomtrain; give another checkout"):
        opening.run(BenchmarkOptions(beside=tmp_path))
