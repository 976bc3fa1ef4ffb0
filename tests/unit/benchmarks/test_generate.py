"""`atom bench generate`: all three ways write the same. No time is asserted."""

from __future__ import annotations

import pytest

from atombench.common import BenchmarkOptions
from atombench.engine import generate
from atombench.engine.generate import GenerateSetup
from atomtrain.errors import ConfigError

SETUP = GenerateSetup(
    layers=6, width=48, inner=96, heads=3, key_heads=1, vocabulary=100, tokens=4, turns=1,
    budget_share=3.0, prompt_tokens=4,
)  # fmt: skip


def test_all_ways_write_the_same_and_the_budget_holds() -> None:
    result = generate.run(BenchmarkOptions(), SETUP)
    assert result["bit_equal"]
    assert 0 < result["peak_device_bytes"] <= result["budget_bytes"]
    assert result["ratio"] == (
        result["generate_tokens_per_s"] / result["transformers_tokens_per_s"]
    )


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompts must be at least 1"):
        GenerateSetup(prompts=0)
