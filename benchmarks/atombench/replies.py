"""What peers of benchmarks answer, and what they count of their network interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atombench.links.shaping import INTERFACE

Reply = dict[str, Any]
"""Plain JSON values by name."""


def sent_bytes() -> int:
    """Return the bytes that have left this host's interface so far, headers included.

    Without such an interface (in tests) there is nothing to count.
    """
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0
