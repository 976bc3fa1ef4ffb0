"""How much of the processor other programs had while something was measured.

Times that were measured beside others are too long, and so is what is predicted from them. What
counts is what others took of the cores that were needed here: on a large host others may be busy
without being in the way.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

CROWDED_SHARE = 0.15
"""Measurements beside others that had more than this are not relied on."""
_LEAST_S = 0.1
"""The kernel counts in hundredths of a second: shorter times say nothing."""
_HELPERS = 2
"""Copies and updates run beside compute."""
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Of a line of /proc/stat: user, nice, system, interrupts (two kinds), stolen by the hypervisor."""


class Moment(NamedTuple):
    """Clocks at a moment."""

    time_s: float
    busy_s: float
    """For how long the cores that this process may use have been busy, all together."""
    own_s: float
    """Processor time of this process, all threads."""


class Watch:
    """Watches the processor from its making on."""

    def __init__(self) -> None:
        self._begun = _now()

    def crowded_share(self) -> float:
        """Return what others had of the needed cores since then; 0 where it cannot be known."""
        ended = _now()
        if self._begun is None or ended is None:
            return 0.0
        cores = len(os.sched_getaffinity(0))
        return crowded_share(self._begun, ended, cores, torch.get_num_threads())


def crowded_share(begun: Moment, ended: Moment, cores: int, threads: int) -> float:
    """Return what others had of the cores needed between two moments.

    Args:
        begun: The first moment.
        ended: The second; 0 is returned if it follows too closely.
        cores: That this process may use.
        threads: With which it computes.
    """
    wall_s = ended.time_s - begun.time_s
    if wall_s < _LEAST_S:
        return 0.0
    others = (ended.busy_s - begun.busy_s - (ended.own_s - begun.own_s)) / wall_s
    needed = min(cores, threads + _HELPERS)
    # Cores that nobody needs are left to others first.
    in_the_way = min(others, others + needed - cores)
    return min(1.0, max(0.0, in_the_way / needed))


def crowded_now(watched_s: float = 1.5 * _LEAST_S) -> float:
    """Return what others have of the cores at this moment; waits so long."""
    watch = Watch()
    time.sleep(watched_s)
    return watch.crowded_share()


def crowding_warning(share: float) -> str | None:
    """Return what to tell of a profile that was taken so, or `None` if nothing is wrong with it."""
    if share <= CROWDED_SHARE:
        return None
    return (
        f"this machine was measured while other programs had {share:.0%} of its processor, so "
        "predicted times are too long; it is measured again at the next start at which they are "
        "idle, or with --profile-again"
    )


def _now() -> Moment | None:
    """Return the clocks; `None` where the kernel does not tell."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        counts = [line.split() for line in lines if line.split(" ", 1)[0] in mine]
        ticks = sum(int(found[1 + field]) for found in counts for field in _BUSY_FIELDS)
    except (OSError, ValueError, IndexError):
        return None
    return Moment(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())
