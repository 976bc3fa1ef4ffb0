"""The benchmark of precisions: its keys, and that it learns alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from atombench import benchmark
from atombench.engine import precision
from atombench.engine.precision import KINDS, MemoryCase, PrecisionSetup, learn, measure
from atomtrain.data.corpus import read_corpus
from atomtrain.data.tokens import Prepared, prepare
from atomtrain.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def text(tmp_path: Any) -> Prepared:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog and again\n" * 2000)
    return prepare(read_corpus(str(file)), tmp_path / "cache", vocabulary=300)


def test_whole_masters_and_float32_learn_nearly_alike(text: Prepared) -> None:
    setup = PrecisionSetup(learning_steps=12)
    wide, narrow = (learn(KINDS[name], setup, text) for name in ("fp32-16", "bf16-16"))
    assert len(wide["losses"]) == len(narrow["losses"]) == 12
    assert narrow["held_out_loss"] < narrow["losses"][0]
    assert narrow["held_out_loss"] == pytest.approx(wide["held_out_loss"], rel=0.05)


def test_memory_is_measured_in_this_process() -> None:
    case = MemoryCase(layers=2, width=64, vocabulary=64)
    row, spent = (measure(KINDS["bf16-8"], case, spends=spends) for spends in (False, True))
    assert row["parameters"] > 0
    assert row["predicted_host_bytes"] > 8 * row["parameters"]
    assert spent["predicted_host_bytes"] < row["predicted_host_bytes"]
    assert row == json.loads(json.dumps(row, allow_nan=False))


def test_the_result_has_a_row_for_each_kind(
    monkeypatch: pytest.MonkeyPatch, text: Prepared
) -> None:
    measured = {
        "measured_bytes_per_parameter": 8.0, "measured_host_bytes": 8, "host_error_share": -0.01,
    }  # fmt: skip
    monkeypatch.setattr(precision, "_measured", lambda *_, **__: measured)
    monkeypatch.setattr(precision, "read_corpus", lambda _: None)
    monkeypatch.setattr(precision, "prepare", lambda *_, **__: text)
    result = precision.run(precision.BenchmarkOptions(quick=True), PrecisionSetup(learning_steps=2))
    assert set(result["kinds"]) == set(KINDS)
    told = [row["told_bytes_per_parameter"] for row in result["kinds"].values()]
    assert told == [16, 16, 14, 12, 10, 8.0625]
    told = [row["told_bytes_per_parameter"] for row in result["spent"].values()]
    assert told == [12, 14, 12, 10, 8, 6.0625]
    assert result["largest_host_error_share"] == 0.01
    assert {"machine", "versions", "inputs", "threads"} <= set(result)
    assert torch.get_num_threads() == result["threads"]
    assert benchmark("precision").module == precision.__name__


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="learning_steps must be at least 1"):
        PrecisionSetup(learning_steps=0)
    with pytest.raises(ConfigError, match="width must be at least 1"):
        MemoryCase(width=0)
