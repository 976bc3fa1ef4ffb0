"""A plugin of pytest that keeps what a test failed with at once, not in the end: time may be over.

`pytest -p atombench.first_hour.failures`, with the file's path in `ATOM_FAILURES`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the first hour goes without it, too
    import pytest

FILE = "ATOM_FAILURES"
_CHARACTERS = 3000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line of JSON: the test's name, and the end of its traceback."""
    # With pytest-xdist the process that starts the others is told, too.
    if not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    told = {"test": report.nodeid, "said": report.longreprtext[-_CHARACTERS:]}
    with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(told) + "\n")
