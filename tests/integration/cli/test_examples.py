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


def test_the_proof_runs_and_would_find_what_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine's times may make the leanest plan the best one, whatever the budget.
    assumed = str(ROOT / "tests" / "support" / "assumed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((assumed, *sys.path)))
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
    assert min(proof["segments"], less["segments"]) > 1
    assert 0 < less["device_peak_bytes"] < proof["device_peak_bytes"]
    assert proof["device_budget_bytes"] < proof["state_bytes"]

    def run_with(first: dict[str, Any], second: dict[str, Any]) -> None:
        names["prove"] = lambda *given: second if given else first
        exec("\n".join(parts), dict(names))

    run_with(proof, less)
    for wrong in (
        {"swapped_losses": [0.0]}, {"swapped_hash": "0"}, {"equal": False},
        {"differing": ["head.weight"]}, {"device_peak_bytes": proof["device_budget_bytes"] + 1},
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            run_with(proof | wrong, less)
    for wrong in (
        {"swapped_hash": "0"}, {"equal": False},
        {"device_peak_bytes": less["device_budget_bytes"] + 1},
        proof,  # as if the smaller budget had made no difference
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            run_with(proof, less | wrong)
