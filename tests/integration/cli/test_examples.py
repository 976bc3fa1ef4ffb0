"""The examples run as they are, each in an empty folder."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atombench import forks
from tests.support import ROOT
from tests.support.waiting import PATIENCE_S

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
AS_A_USER = "dataloader"
"""Starts as a user starts it; the others are forks of a process that has the heavy packages."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(example)]
    where: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}}
    if example.stem == AS_A_USER:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **where
        )
    else:
        done = forks.run(command, PATIENCE_S, **where)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


def test_one_example_starts_as_a_user_starts_it() -> None:
    assert AS_A_USER in {path.stem for path in EXAMPLES}


def cells(notebook: str) -> list[str]:
    """Return the code of a notebook's cells."""
    text = (ROOT / "examples" / notebook).read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code), "a notebook is kept without what it printed"
    return ["".join(cell["source"]) for cell in code]


def test_the_notebook_shows_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells("notebook.ipynb"):
        *body, last = ast.parse(cell).body
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            shown.append(value)
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    pictures = [value._repr_png_() for value in shown if hasattr(value, "_repr_png_")]
    assert len(pictures) == 2
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.usefixtures("assumed_times")  # a busy machine may cut both as finely as can be
def test_the_proof_runs_and_would_find_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    start, *parts = cells("proof.ipynb")
    names: dict[str, Any] = {}
    exec(start, names)
    assert names["STEPS"] == 5
    names["STEPS"] = 1
    for part in parts:
        exec(part, names)
    proof, less = names["proof"], names["less"]
    said = capsys.readouterr().out
    assert said.count(proof["resident_hash"]) == 4
    assert less["segments"] > proof["segments"] > 1
    assert proof["device_budget_bytes"] < proof["state_bytes"]

    for wrong in (
        {"swapped_losses": [0.0]}, {"swapped_hash": "0"}, {"equal": False},
        {"differing": ["head.weight"]}, {"device_peak_bytes": proof["device_budget_bytes"] + 1},
    ):  # fmt: skip
        names["prove"] = lambda *given, wrong=wrong: (less if given else proof) | wrong
        with pytest.raises(AssertionError):
            exec("\n".join(parts), dict(names))
