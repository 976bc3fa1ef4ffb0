"""What the kernel tells of this host: its processor, cores, caches, and the nodes of its memory.

All is read from files below `/sys` and `/proc`; where they are missing, as in some containers and
outside Linux, each function says what it takes for granted.
"""

from __future__ import annotations

import functools
import mmap
import os
import platform
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
_STATUS = Path("/proc/self/status")
ASSUMED_CACHE_BYTES = 64 << 20
"""Of a host that does not tell: more than desktops have, less than large servers."""
ASSUMED_MEMORY_BYTES = 8 << 30
"""Likewise; `--host-memory` says how much a model may take."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def allowed_cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what the processor calls itself; its architecture where nothing tells."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, str | int]:
    """Return what results and reports say of this host; not its name."""
    return {
        "processor": processor_name(),
        "cores": len(allowed_cores()),
        "memory_bytes": memory_bytes(),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
    }


def memory_bytes() -> int:
    """Return the bytes of physical memory; `ASSUMED_MEMORY_BYTES` where nothing tells."""
    return _pages("SC_PHYS_PAGES") * mmap.PAGESIZE or ASSUMED_MEMORY_BYTES


def free_memory_bytes() -> int:
    """Return the bytes of memory that nothing uses; half of all where nothing tells."""
    return _pages("SC_AVPHYS_PAGES") * mmap.PAGESIZE or memory_bytes() // 2


def _pages(name: str) -> int:
    try:
        return os.sysconf(name)
    except (AttributeError, ValueError, OSError):  # Windows has no such call, macOS fewer names
        return 0


@functools.cache
def physical_cores(logical: frozenset[int], system: Path = SYSTEM) -> int:
    """Return how many physical cores these logical ones are; all of them where nothing tells."""
    try:
        siblings = {
            (system / f"cpu/cpu{core}/topology/thread_siblings_list").read_text()
            for core in logical
        }
    except OSError:
        return max(1, len(logical))
    return len(siblings)


@functools.cache
def cache_bytes(logical: frozenset[int], system: Path = SYSTEM) -> int:
    """Return the bytes of the last caches that these logical cores have, all together.

    Cores that share a cache count it once; chips and sockets have their own. Some virtual machines
    show less than is there. `ASSUMED_CACHE_BYTES` where nothing tells.
    """
    last: dict[str, int] = {}
    for core in logical:
        found = [
            (level, shared, size)
            for folder in (system / f"cpu/cpu{core}/cache").glob("index*")
            if (cache := _cache_of(folder)) is not None
            for level, shared, size in [cache]
        ]
        if found:
            _, shared, size = max(found)
            last[shared] = size
    return sum(last.values()) or ASSUMED_CACHE_BYTES


def memory_nodes(system: Path = SYSTEM, status: Path = _STATUS) -> list[int]:
    """Return the nodes with memory that this process may use; `[0]` where nothing tells."""
    try:
        nodes = numbers_of((system / "node/has_memory").read_text())
    except (OSError, ValueError):
        return [0]
    try:
        lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        mine = next(line for line in lines if line.startswith("Mems_allowed_list:"))
        return sorted(nodes & numbers_of(mine.partition(":")[2])) or [0]
    except (OSError, ValueError, StopIteration):
        return sorted(nodes) or [0]


def numbers_of(text: str) -> set[int]:
    """Return the numbers of a list of the kernel, such as `0-3,8`.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cache_of(folder: Path) -> tuple[int, str, int] | None:
    """Return a cache's level, who shares it, and its bytes; `None` of one of instructions."""
    try:
        level, kind, shared, size = (
            (folder / name).read_text().strip()
            for name in ("level", "type", "shared_cpu_list", "size")
        )
        number = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        return None if kind == "Instruction" else (int(level), shared, number)
    except (OSError, ValueError):
        return None
