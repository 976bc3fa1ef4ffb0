"""Threads that share one update: each takes one range of the elements.

What limits scaling is memory: an update moves 16 to 40 bytes an element and computes little, so a
few cores take all that memory gives. Ranges are as few as threads, since after each the interpreter
lock is taken again, and whoever launches work for the device may hold it for milliseconds. Threads
that wait sleep. They are not bound to cores: where memory has several nodes, it lies on all of them
(`atomtrain.engine.devices.host_memory.interleaved`), so that no range is nearer to one core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from atomtrain.topology import allowed_cores, physical_cores

LEAST_ELEMENTS = 1 << 16
"""Fewer are not worth a thread."""
_FEW_CORES, _MANY_CORES = 2, 8
"""Up to so few cores none is left to whoever launches work, from more than so many on two are."""


def run(job: Callable[[int, int], None], count: int, multiple: int) -> None:
    """Do a job for all elements, in ranges, with as many threads as `threads` says; waits for all.

    Args:
        job: Called with begin and end of a range; no result may depend on how ranges are cut.
        count: Elements.
        multiple: Of which each range's begin is one.
    """
    share([functools.partial(job, *some) for some in divided(count, multiple, threads())])


def share(jobs: Sequence[Callable[[], None]]) -> None:
    """Do some jobs at once, the first one on this thread; waits for all."""
    if not jobs:
        return
    others = [_executor().submit(job) for job in jobs[1:]]
    try:
        jobs[0]()
    finally:  # memory must stay until nobody writes it
        wait(others)
    for other in others:
        other.result()


def dealt(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of things of these sizes in at most so many hands, all about as full, none
    with few elements unless it is alone."""
    hands = [list[int]() for _ in range(max(1, min(parts, sum(sizes) // LEAST_ELEMENTS)))]
    held = [0] * len(hands)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        least = held.index(min(held))
        hands[least].append(index)
        held[least] += sizes[index]
    return [hand for hand in hands if hand]


def divided(count: int, multiple: int, parts: int) -> list[tuple[int, int]]:
    """Return at most so many ranges of about one size, none of few elements unless it is alone."""
    parts = max(1, min(parts, count // LEAST_ELEMENTS))
    each = -(-count // (parts * multiple)) * multiple
    return [(begin, min(begin + each, count)) for begin in range(0, count, each or 1)]


def threads() -> int:
    """Return how many threads share an update: the physical cores that the process may use, at most
    as many as PyTorch uses. Where there are more than two, one is left to whoever launches work,
    and two of more than eight."""
    cores = physical_cores(allowed_cores())
    left = 0 if cores <= _FEW_CORES else 1 if cores <= _MANY_CORES else 2
    return max(1, min(cores - left, torch.get_num_threads()))


@functools.cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="atom-native")


if hasattr(os, "register_at_fork"):  # a child has no threads of its parent
    os.register_at_fork(after_in_child=_executor.cache_clear)
