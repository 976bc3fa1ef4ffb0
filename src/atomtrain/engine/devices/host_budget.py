"""How much host memory this process may take: what is available, and what control groups leave it.

Physical memory is not the answer: other programs have some of it, and a container may have less.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from atomtrain.units import format_bytes

_ROOM_SHARE = 1 / 20
_LEAST_ROOM_BYTES = 512 << 20
_MOST_ROOM_SHARE = 1 / 4
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes a limit beyond all memory where there is none."""


class HostMemory(NamedTuple):
    """Memory of this host at a moment, in bytes."""

    total_bytes: int
    available_bytes: int
    """What programs can have without swapping, by the kernel's estimate."""
    group_bytes: int | None
    """What the control groups of this process let it take beside what they have; `None`: they have
    no limit."""

    @property
    def usable_bytes(self) -> int:
        """What a model may take: some room is left to all others, and to Python itself."""
        there = self.available_bytes
        if self.group_bytes is not None:
            there = min(there, self.group_bytes)
        room = max(_LEAST_ROOM_BYTES, int(_ROOM_SHARE * there))
        return max(1, there - min(room, int(_MOST_ROOM_SHARE * there)))

    def __str__(self) -> str:
        text = f"{format_bytes(self.available_bytes)} of {format_bytes(self.total_bytes)} free"
        if self.group_bytes is not None and self.group_bytes < self.available_bytes:
            text += f", of which this container may take {format_bytes(self.group_bytes)}"
        return text


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this host now.

    Args:
        root: Where `proc` and `sys` lie; for tests.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total_bytes = page_bytes * os.sysconf("SC_PHYS_PAGES")
    available_bytes = page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    for line in lines_of(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            n_bytes = int(rest.split()[0]) << 10
            if name == "MemTotal":
                total_bytes = n_bytes
            else:
                available_bytes = n_bytes
    left = [each for group in _groups(root) if (each := _left_bytes(group)) is not None]
    return HostMemory(total_bytes, available_bytes, min(left, default=None))


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that count this process's memory, each in the next:
    the least limit holds.

    In a container the path may be the host's, of which only the last folder is there, as the root.
    """
    mounted = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        inner = PurePosixPath("/" + path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield top / str(group).lstrip("/")


def _left_bytes(group: Path) -> int | None:
    """Return what a control group can still take, `None` where it has no limit."""
    limits = [
        limit
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        if (limit := _number(group / name)) is not None and limit < _UNLIMITED_BYTES
    ]
    if not limits:
        return None
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes") or 0
    # What was read from files and not touched for long counts as used, and goes when it is needed.
    files = 0
    for line in lines_of(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            files = max(files, int(value))
    return max(0, min(limits) - max(0, used - files))


def _number(path: Path) -> int | None:
    for line in lines_of(path):
        if line.strip().isdigit():
            return int(line)
    return None
