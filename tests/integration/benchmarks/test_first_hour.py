"""`scripts/first-hour`, rehearsed on the emulated device where nearly every package is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atombench.first_hour.hour import SECONDS, HourOptions, main, run
from atomtrain.engine.devices.cuda import Cuda
from tests.support import ROOT

LACKING = (
    "hivemind", "blake3", "cryptography", "deepspeed", "msgspec", "base58", "rich", "matplotlib",
    "psutil", "starlette", "uvicorn", "textual", "pytest_timeout",
)  # fmt: skip
LIMIT_S = 3000.0
"""On a machine of any load; a quiet one takes two minutes."""

pytestmark = pytest.mark.slow


def test_every_part_comes_to_its_end_where_packages_are_missing(tmp_path: Path) -> None:
    out = tmp_path / "found"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "first-hour"), "--device", "emulated",
            "--out", str(out), "--limit", str(LIMIT_S),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LIMIT_S + 100,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests" / "support" / "poor"),
            "ATOM_TEST_LACKS": ",".join(LACKING),
            "CXX": "no-such-compiler",  # with one, torch compiles for a minute
        },
    )  # fmt: skip
    rows = {part: json.loads((out / f"{part}.json").read_text()) for part in SECONDS}
    said = {part: (row["failure"], row["said"]) for part, row in rows.items()}
    assert {row["state"] for row in rows.values()} == {"ok"}, said
    assert done.returncode == 0, done.stderr
    assert all(row["complete"] for row in rows.values())
    assert {path.name for path in out.iterdir()} == {*(f"{part}.json" for part in SECONDS),
                                                     "table.txt"}  # fmt: skip
    assert done.stdout == (out / "table.txt").read_text()
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "] == [
        "part", *SECONDS, "Measured",
    ]  # fmt: skip

    assert {"hivemind", "blake3", "cryptography", "deepspeed"} <= set(rows["machine"]["skipped"])
    assert rows["machine"]["pinned"]["load_bytes_per_s"] > 0
    models = rows["memory"]["models"]
    assert set(models) == {"gpt", "llama"}
    for found in models.values():
        assert found["same_bits"] is True
        assert found["allocated_peak_bytes"] <= found["predicted_peak_bytes"]
    cases = rows["timeline"]["cases"]
    assert set(cases) == {"plain", "tight"}
    assert "no-such-compiler" in rows["timeline"]["skipped"]["compiled"]
    assert cases["tight"]["device_peak_bytes"] <= cases["tight"]["budget_bytes"]
    assert cases["tight"]["budget_bytes"] < cases["plain"]["device_peak_bytes"]
    assert {span[0] for span in cases["plain"]["measured_spans"]} >= {"compute", "load", "update"}
    assert rows["large"]["steps"] == 1
    assert rows["large"]["optimizer"] == "adamw-bfloat16-split"
    assert set(rows["offloaders"]["rows"]) == {"resident", "fsdp2", "atom"}


def test_without_pytest_the_other_parts_run(tmp_path: Path) -> None:
    out = tmp_path / "found"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "first-hour"), "--device", "emulated",
            "--out", str(out), "--only", "machine,tests",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests" / "support" / "poor"),
            "ATOM_TEST_LACKS": "pytest,_pytest",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "tests.json").read_text())["skipped"] == {
        "pytest": "the tests of the GPU"
    }
    assert json.loads((out / "machine.json").read_text())["pinned"]["load_bytes_per_s"] > 0


def test_a_python_without_torch_is_told_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts" / "first-hour"), "--device", "emulated"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line == (
        f"first-hour: {sys.executable} has no torch; run this with a Python that has one"
    )


def test_a_late_part_is_ended_and_told(tmp_path: Path) -> None:
    options = HourOptions(device="emulated", out=tmp_path, only="optimizers", limit=0.1)
    (row,) = run(options)
    assert row["state"] == "late"
    assert json.loads((tmp_path / "optimizers.json").read_text())["complete"] is False
    assert "ended after" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "--device 'tpu' does not exist; cuda or emulated"),
        (("--only", "machine,lare"), "--only 'lare' does not exist"),
        (("--limit", "0"), "--limit must be above 0 seconds"),
        ((), "there is no CUDA device: torch finds no card today. Without a GPU rehearse"),
    ],
)
def test_mistakes_are_told(
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Cuda, "count", lambda _: 0)
    monkeypatch.setattr(Cuda, "why_none", lambda _: "torch finds no card today")
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
