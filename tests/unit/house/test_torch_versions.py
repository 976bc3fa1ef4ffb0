"""`scripts/torch-versions` skips by name what a machine lacks, and fails where nothing was run."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT


def test_a_missing_interpreter_is_skipped_by_name_and_nothing_run_is_a_failure() -> None:
    command = [sys.executable, ROOT / "scripts" / "torch-versions", "--python", "no-such-python"]
    done = subprocess.run(
        [*command, "--torch", "2.13.0,2.14.1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert [line.partition(" skipped")[0].strip() for line in done.stdout.splitlines()] == [
        "no-such-python, torch 2.13.0",
        "no-such-python, torch 2.14.1",
    ]
    assert done.stdout.count("skipped: there is no no-such-python") == 2
