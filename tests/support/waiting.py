"""How tests wait for others: for the event itself, and long enough for any machine."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 600.0
"""Only what never happens takes so long, on a machine that stands still for seconds as well."""
_POLL_S = 0.02


def wait_until(condition: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Wait until a condition holds; fails the test, with what `told` returns, if it never does."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, told()
        time.sleep(_POLL_S)
