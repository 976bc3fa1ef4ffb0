"""The table of the first hour: of parts that ended, were late at any moment, or failed."""

from __future__ import annotations

from typing import Any

import pytest

from atombench.first_hour.hour import SECONDS
from atombench.first_hour.parts import PARTS
from atombench.first_hour.table import table

FAILED = [
    {"test": "tests/gpu/test_cuda.py::test_a", "said": "a.py:3: in test_a\nE   assert 1 == 2"}
]


def row(part: str, **found: Any) -> dict[str, Any]:
    return {"part": part, "state": "ok", "seconds": 1.0, "failure": "", **found}


def test_every_part_has_its_time_and_its_lines() -> None:
    assert list(PARTS) == list(SECONDS)
    assert sum(SECONDS.values()) <= 570


@pytest.mark.parametrize("part", SECONDS)
def test_a_part_that_found_nothing_says_why(part: str) -> None:
    text = table([row(part, state="late", failure="ended after 3 s")], "with the core")
    assert "ended after 3 s" in text
    assert text.splitlines()[-1] == "Measured with the core."


def test_steps_of_a_large_model_that_came_late() -> None:
    found = {
        "inputs": {"model": "gpt3-6.7b"}, "optimizer": "adamw", "open_s": 50.0,
        "predicted_step_s": 10.0, "first_step_s": 12.0,
    }  # fmt: skip
    opened = table([row("large", **found)], "")
    assert "first step 12.00 s; step 10.00 s predicted" in opened
    assert "tokens/s" not in opened
    steps = {
        "steps": 1, "step_s": 11.0, "tokens_per_s": 11915.6, "model_flops_per_s": 4.8e14,
        "link_wait_share": 0.015, "device_peak_bytes": 20 << 30,
        "predicted_device_peak_bytes": 21 << 30, "device_budget_bytes": 24 << 30,
    }  # fmt: skip
    text = table([row("large", **found, **steps)], "")
    assert "11.00 s a step, 1.192e+04 tokens/s, 480 TFLOP/s of the model, 1.5% waiting" in text
    assert "21.0 GiB predicted, 20.0 GiB measured, budget 24.0 GiB" in text


def test_failures_and_what_is_left_out_have_a_line_each() -> None:
    rows = [
        row("tests", counts={"passed": 3, "failed": 1}, failed=FAILED),
        row("memory", models={}, skipped={"transformers": "the Llama"}),
        row("offloaders", rows={"fsdp2": {"failure": "out of memory"}}, tokens_per_step=8),
    ]
    lines = table(rows, "").splitlines()
    assert any("3 passed, 1 failed" in line for line in lines)
    [place] = [i for i, line in enumerate(lines) if line.split()[:1] == ["failed"]]
    assert lines[place].split() == ["failed", "tests/gpu/test_cuda.py::test_a"]
    assert lines[place + 1].strip() == "assert 1 == 2"
    assert any("transformers: the Llama" in line for line in lines)
    assert any("out of memory" in line for line in lines)
