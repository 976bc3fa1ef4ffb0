"""`atom bench context`: a long sequence keeps to its budget, as predicted."""

from __future__ import annotations

from atombench.common import BenchmarkOptions
from atombench.engine.context import ContextSetup, run


def test_a_long_sequence_keeps_to_its_budget() -> None:
    setup = ContextSetup(tokens=2048, layers=2, width=32, device_memory="24MiB")
    result = run(BenchmarkOptions(), setup)
    assert 0 < result["device_peak_bytes"] <= result["predicted_device_peak_bytes"]
    assert result["predicted_device_peak_bytes"] <= result["device_budget_bytes"] == 24 << 20
    assert result["attention_matrix_bytes"] == 2 * 4 * 2048 * 2048 > result["device_budget_bytes"]
