"""Measurements of the link and the host optimizer, each a fraction of a second.

All are medians, and sizes follow from a first try, so that a slow link does not make the profile
slow. What moves memory moves more than the last caches hold, as training does: either at once, or
in turns through so much.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.gpus import card_of
from atomtrain.engine.devices.streams import Stream
from atomtrain.topology import allowed_cores, cache_bytes, memory_bytes

_TIMES_CACHES = 4
"""What a probe goes through, over what the last caches hold. Round and round, a cache that drops
what was used longest ago has nothing of it; others keep no more than their share."""
_LEAST_BYTES = 64 << 20
_MEMORY_SHARE = 16
"""No probe goes through more than this part of the memory, also where caches are huge."""
_LEAST_LINK_BYTES = 64 << 20
_SMALLEST_BYTES = 4 << 10
_COPY_S = 0.02
"""How long a measured copy should take."""
_REPEATS = 5
ADAMW_HELD_BYTES = 16
"""Parameter, gradient and two moments in float32."""
_PIECE_PARAMETERS = 1 << 19
"""Of an update beside compute."""
_STEAL_S = 0.05
"""How long compute is watched at a time while something else runs."""
_ROUNDS = 3


class LinkRates(NamedTuple):
    """What the link between host and device does."""

    load_bytes_per_s: float
    unload_bytes_per_s: float
    both_ways_share: float
    copy_s: float
    """What a copy takes beside its bytes."""


class Stolen(NamedTuple):
    """What compute loses to other work of the same processor."""

    s_per_copied_byte: float
    s_per_update: float


def uncached_bytes(device: torch.device | None = None) -> int:
    """Return how many bytes a probe must go through so that they come from memory.

    Args:
        device: Whose memory and caches; `None` is the host.
    """
    card = None if device is None else card_of(device)
    if card is not None:
        caches, memory = card.cache_bytes, card.total_bytes
    else:
        caches = cache_bytes(allowed_cores())
        memory = memory_bytes()
    return min(max(_LEAST_BYTES, _TIMES_CACHES * caches), memory // _MEMORY_SHARE)


def link_rates(device: Device, *, pinned: bool = True) -> LinkRates:
    """Measure copies over the link, through the streams that training uses.

    Args:
        device: Idle, with a quarter of its budget free.
        pinned: From memory of `Device.host_empty`; else from ordinary memory.
    """
    most_bytes = max(_LEAST_LINK_BYTES, uncached_bytes() // 2)
    most_bytes = max(_SMALLEST_BYTES, min(most_bytes, device.memory_bytes // 8))
    with device.computing():
        there = [device.empty((most_bytes,), torch.uint8) for _ in range(2)]
    here = [_host_memory(device, most_bytes, pinned) for _ in range(2)]
    device.synchronize()

    def load(n_bytes: int) -> Callable[[], None]:
        return lambda: device.copy_in(there[0][:n_bytes], here[0][:n_bytes])

    def unload(n_bytes: int) -> Callable[[], None]:
        return lambda: device.copy_out(here[1][:n_bytes], there[1][:n_bytes])

    n_bytes = _worthwhile(lambda size: timed_through(device.load, load(size)), most_bytes)
    smallest_s = median(
        [timed_through(device.load, load(_SMALLEST_BYTES)) for _ in range(_REPEATS)]
    )
    load_s = median([timed_through(device.load, load(n_bytes)) for _ in range(_REPEATS)])
    unload_s = median([timed_through(device.unload, unload(n_bytes)) for _ in range(_REPEATS)])
    both_s = median([_both(device, load(n_bytes), unload(n_bytes)) for _ in range(_REPEATS)])
    load_rate = _slope(n_bytes, load_s, smallest_s)
    return LinkRates(
        load_bytes_per_s=load_rate,
        unload_bytes_per_s=_slope(n_bytes, unload_s, smallest_s),
        both_ways_share=min(1.0, max(load_s, unload_s) / both_s),
        copy_s=max(0.0, smallest_s - _SMALLEST_BYTES / load_rate),
    )


def host_copy_bytes_per_s() -> float:
    """Measure copies from host memory to host memory with all threads."""
    n_bytes = uncached_bytes() // 2
    source, target = (torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(2))
    return n_bytes / median([timed(lambda: target.copy_(source)) for _ in range(_REPEATS)])


def adamw_parameters(device: torch.device | None = None) -> int:
    """Return how many parameters of a float32 AdamW caches do not hold."""
    return max(1, uncached_bytes(device) // ADAMW_HELD_BYTES)


def update_parameters_per_s(parameters: int | None = None) -> float:
    """Measure a fused AdamW in float32, on a thread of its own as in training.

    Args:
        parameters: How many; `None` is more than caches hold.
    """
    parameters = parameters or adamw_parameters()
    step = adamw_step(parameters)
    stream = Stream("probe")
    try:
        timed_through(stream, step)
        return parameters / median([timed_through(stream, step) for _ in range(_REPEATS)])
    finally:
        stream.close()


def device_update_parameters_per_s(device: Device) -> float:
    """Measure a fused AdamW in float32 on the device, where compute runs."""
    room = device.memory_bytes // 4 // ADAMW_HELD_BYTES
    parameters = max(1, min(adamw_parameters(device.torch_device), room))
    with device.computing():
        step = adamw_step(parameters, device.torch_device)

        def finished() -> None:
            step()
            device.synchronize()

        finished()
        return parameters / median([timed(finished) for _ in range(_REPEATS)])


def stolen(device: Device, work: Callable[[], None], copy_bytes: int) -> Stolen:
    """Measure what copies and updates cost computing on the same processor.

    Args:
        device: Whose copies are the processor's own work.
        work: A short piece of compute, some milliseconds at most.
        copy_bytes: Size of the copies; one should take some milliseconds too.
    """
    all_bytes = uncached_bytes()
    turns = max(1, all_bytes // 2 // copy_bytes)
    here, there = (torch.zeros(turns, copy_bytes, dtype=torch.uint8) for _ in range(2))
    places = itertools.cycle(range(turns))
    parameters = min(_PIECE_PARAMETERS, adamw_parameters())
    steps = [adamw_step(parameters) for _ in range(adamw_parameters() // parameters)]
    for first in steps:  # makes its state
        first()
    next_step = itertools.cycle(steps)

    def copy() -> None:
        place = next(places)
        device.copy_in(there[place], here[place])

    def step() -> None:
        next(next_step)()

    work()
    copying, updating = [], []
    # It cannot cost more than the processor's time that it takes; a busy machine makes it seem so.
    most_copying, most_updating = _processor_s(copy), _processor_s(step)
    for _ in range(_ROUNDS):  # in turns, so that a busy moment does not count for one of them
        alone = _pace(work, None)
        copying.append(_pace(work, copy).stolen_s(alone))
        updating.append(_pace(work, step).stolen_s(alone))
    return Stolen(
        min(median(copying), most_copying) / copy_bytes,
        min(median(updating), most_updating) / parameters,
    )


class _Pace(NamedTuple):
    """Pieces of compute done in a time, and pieces of other work beside them."""

    pieces: int
    seconds: float
    others: int

    def stolen_s(self, alone: _Pace) -> float:
        """Return the seconds of compute that one piece of the other work cost."""
        lost_s = self.seconds - self.pieces * alone.seconds / alone.pieces
        return max(0.0, lost_s) / max(1, self.others)


def _pace(work: Callable[[], None], other: Callable[[], None] | None) -> _Pace:
    with _beside(other) as count:
        pieces = 0
        started_s = time.perf_counter()
        while (seconds := time.perf_counter() - started_s) < _STEAL_S or pieces < 2:
            work()
            pieces += 1
        return _Pace(pieces, seconds, count())


@contextmanager
def _beside(other: Callable[[], None] | None) -> Iterator[Callable[[], int]]:
    """Repeat `other` on a thread meanwhile; yields how often it was done so far."""
    done, stop = [0], threading.Event()

    def repeat() -> None:
        while other is not None and not stop.is_set():
            other()
            done[0] += 1

    thread = threading.Thread(target=repeat, name="atom-probe", daemon=True)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        stop.set()
        thread.join()


def adamw_step(parameters: int, device: torch.device | None = None) -> Callable[[], None]:
    """Return a step of the optimizer by which machines are rated: a fused float32 AdamW."""
    parameter = torch.nn.Parameter(torch.zeros(parameters, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def step() -> None:
        optimizer.step()

    return step


def _host_memory(device: Device, n_bytes: int, pinned: bool) -> Tensor:
    memory = device.host_empty(n_bytes) if pinned else torch.empty(n_bytes, dtype=torch.uint8)
    return memory.zero_()  # touched, so that no page is missing when it is copied


def _worthwhile(copy_s: Callable[[int], float], most_bytes: int) -> int:
    """Return a size whose copy takes long enough to be measured, and not much longer."""
    n_bytes = _SMALLEST_BYTES
    # The best of three: one hiccup must not make a fast link look slow.
    while n_bytes < most_bytes and min(copy_s(n_bytes) for _ in range(3)) < _COPY_S / 4:
        n_bytes = min(4 * n_bytes, most_bytes)
    return n_bytes


def timed_through(stream: Stream, job: Callable[[], None]) -> float:
    """Return the seconds of a job on a stream's thread, hand-over included."""
    return timed(lambda: stream.submit(job).wait())


def _both(device: Device, load: Callable[[], None], unload: Callable[[], None]) -> float:
    def copies() -> None:
        events = [device.load.submit(load), device.unload.submit(unload)]
        for event in events:
            event.wait()

    return timed(copies)


def _processor_s(work: Callable[[], None]) -> float:
    """Return the processor's time that a piece of work takes, on all its threads."""
    work()
    started_s = time.process_time()
    for _ in range(_REPEATS):
        work()
    return (time.process_time() - started_s) / _REPEATS


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a piece of work takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _slope(n_bytes: int, seconds: float, smallest_s: float) -> float:
    """Return the rate of a copy without what a copy of nothing takes."""
    if n_bytes > _SMALLEST_BYTES and seconds > 1.5 * smallest_s:
        return (n_bytes - _SMALLEST_BYTES) / (seconds - smallest_s)
    return n_bytes / seconds
