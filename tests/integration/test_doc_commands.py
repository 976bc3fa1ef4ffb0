"""What the documentation shows and can be run here is run as it stands, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from doc_commands import shown_commands
from train_processes import write_text


def test_commands_in_the_documentation_run(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    write_text(tmp_path / "books" / "text.txt")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for shown in shown_commands():
        if shown.runs:
            done = subprocess.run(
                [sys.executable, "-m", "atomtrain.cli.main", *shown.words],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, (shown.words, done.stderr)
            assert done.stdout
