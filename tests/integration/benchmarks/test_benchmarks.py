"""Benchmarks as their callers see them: one JSON object, the contract's keys, equal bits.

Nothing here asserts a time: test machines are busy. Inputs are tiny.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atombench import REGISTRY, benchmark
from atombench.common import BenchmarkOptions, report
from atombench.engine import swap
from atombench.engine.swap import in_small_pieces, wider
from atombench.engine.swap_pairs import opened, sizes_of
from atomtrain.errors import ConfigError

DEADLINE_S = 600.0

# The command itself, with inputs small enough for a test in place of those of --quick.
TINY = """
import sys
from atombench.engine import depth, swap
from atombench.engine.swap_pairs import cores
from atomtrain.cli.main import main

swap.QUICK = swap.SwapSetup(
    layers=6, width=96, vocabulary=64, sequence_tokens=24, sequences=1, micro_batches=3,
    threads=cores(), pairs=2, block_steps=2, recompute_pairs=1, all_threads_pairs=1, link_pairs=1,
    wide_width=128, wide_pairs=1, link_layers=8, link_micro_batches=3, update_pairs=1,
    update_tokens=8,
)
depth.QUICK = depth.DepthSetup(
    depths=(4, 12), width=64, vocabulary=64, sequence_tokens=16, device_memory_bytes=2 << 20,
)
raise SystemExit(main(["bench", *sys.argv[1:], "--quick"]))
"""

SWAP_KEYS = {
    "resident_step_s", "swapped_step_s", "speed_ratio", "link_wait_share", "device_peak_bytes",
    "device_budget_bytes", "state_bytes", "tokens_per_step", "bit_equal", "machine", "versions",
    "parameters", "inputs", "plan", "link_bound_share", "link_bound_bytes_per_s",
    "link_bound_bit_equal", "link_bound_predicted_share",
    "recompute_speed_ratio", "recompute_link_wait_share", "all_threads_speed_ratio",
    "wide_speed_ratio", "wide_parameters", "wide_link_wait_share",
    "updates_step_s", "updates_torch_step_s", "updates_speed_ratio", "updates_tokens_per_step",
    "processor_s", "resident_processor_s", "resident_counting_share", "threads",
}  # fmt: skip


def run_tiny(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TINY, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )


def only_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one JSON object that is all of the standard output."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert isinstance(result, dict)
    return result


def test_swap_compares_equal_work_with_equal_bits(tmp_path: Path) -> None:
    out = tmp_path / "new" / "swap.json"
    result = only_object(run_tiny("swap", "--json", "--out", str(out)))
    assert set(result) >= SWAP_KEYS
    assert result["bit_equal"] is True
    assert result["recompute_bit_equal"] is True
    assert result["all_threads_bit_equal"] is True
    assert result["link_bound_bit_equal"] is True
    peak, budget = result["link_bound_device_peak_bytes"], result["link_bound_device_budget_bytes"]
    assert 0 < peak <= budget
    assert result["wide_bit_equal"] is True
    assert result["updates_bit_equal"] is True
    assert result["updates_core"] is True
    assert result["updates_tokens_per_step"] == 8
    assert result["wide_parameters"] > result["parameters"]
    assert 0 < result["wide_device_peak_bytes"] <= result["wide_device_budget_bytes"]
    assert set(result["recompute_plan"]["activations"]) == {"recompute"}
    assert result["tokens_per_step"] == 3 * 24
    assert result["state_bytes"] >= 4 * result["device_budget_bytes"]
    assert 0 < result["device_peak_bytes"] <= result["device_budget_bytes"]
    assert result["state_bytes"] == 16 * result["parameters"]
    assert result["resident_step_s"] > 0
    assert result["swapped_step_s"] > 0
    assert 0 <= result["link_wait_share"] <= 1
    assert len(result["speed_ratio_of_pairs"]) == 2
    assert json.loads(out.read_text()) == result
    assert [path.name for path in out.parent.iterdir()] == ["swap.json"]


@pytest.mark.parametrize("of", ["as it is", "wide", "link"])
def test_the_quick_inputs_of_swap_fit_their_budget(of: str) -> None:
    setup = swap.QUICK
    if of == "wide":
        setup = wider(setup)
    if of == "link":
        setup = in_small_pieces(setup)
    budget_bytes = sizes_of(setup).budget_bytes
    with opened(setup, 1e9, budget_bytes, profile=False) as (engine, _):
        assert engine.plan.device_peak_bytes <= budget_bytes


def test_depth_does_not_raise_the_peak() -> None:
    result = only_object(run_tiny("depth", "--json"))
    peaks = result["device_peak_bytes"]
    assert list(peaks) == ["4", "12"]
    assert 0 < peaks["12"] <= result["device_budget_bytes"]
    assert peaks["12"] <= 1.02 * peaks["4"]
    assert result["state_bytes"]["12"] > 2 * result["state_bytes"]["4"]
    assert {"machine", "versions", "inputs"} <= set(result)


def test_without_json_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report({"peak_bytes": {"8": 3 << 20}, "step_s": 1.5, "wait_share": 0.25, "bit_equal": True})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["peak_bytes.8", "3.0", "MiB"],
        ["step_s", "1.50", "s"],
        ["wait_share", "25.0%"],
        ["bit_equal", "True"],
    ]


def test_a_result_that_cannot_be_written_is_an_error_on_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"^cannot write the result to") as caught:
        report({"x": 1}, json=True, out=blocked / "result.json")
    assert "\n" not in str(caught.value)


def test_out_must_not_be_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        BenchmarkOptions(out=tmp_path)


def test_an_unknown_choice_of_links_is_told() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'stand-ins'"):
        BenchmarkOptions(links="stand-in")


def test_every_registered_benchmark_can_be_run() -> None:
    """Each module exists and has a `run`; an unknown name gets the nearest one."""
    import importlib

    for name, entry in REGISTRY.items():
        assert callable(importlib.import_module(entry.module).run), name
        assert entry.help
        assert benchmark(name) is entry
    with pytest.raises(ConfigError, match="Did you mean 'swap'"):
        benchmark("swop")


def test_the_registry_imports_nothing_heavy() -> None:
    code = "import sys, atombench.common; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False)
    assert done.returncode == 0


def test_results_are_replaced_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    out.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        report({"value_s": float("nan")}, json=True, out=out)
    assert out.read_text() == "old"
    assert capsys.readouterr().out == ""
    report({"value_s": 1.5}, json=True, out=out)
    assert json.loads(out.read_text()) == {"value_s": 1.5}
    assert json.loads(capsys.readouterr().out) == {"value_s": 1.5}
