"""The compiled kernels that fit this processor, what `kernels/updates.h` declares, and the threads
that share a call: each takes one range of the elements.

What limits scaling is memory: an update moves 16 to 40 bytes an element and computes little, so a
few cores take all that memory gives. Ranges are as few as threads, since after each the interpreter
lock is taken again, and whoever launches work for the device may hold it for milliseconds. Threads
that wait sleep. They are not bound to cores: where memory has several nodes, it lies on all of them
(`atomtrain.engine.devices.host_memory.interleaved`), so that no range is nearer to one core.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
from torch import Tensor

from atomtrain.native.build import HERE, fingerprint, library_path
from atomtrain.topology import allowed_cores, physical_cores

_LOG = logging.getLogger(__name__)


def core() -> ctypes.CDLL | None:
    """Return the library, or `None` where the PyTorch path has to do; said once in the log.

    Calls release the interpreter's lock.
    """
    return _loaded()


def address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """Return where a tensor's values begin: what kernels are told, who know no strides."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels take contiguous memory only"
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    found, reason = load(HERE)
    if found is None:
        _LOG.warning("updates and codecs run on PyTorch, which is slower: %s", reason)
    return found


def load(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return the library in a folder for this processor, or `None` and why it cannot be used."""
    path = library_path(level(), folder)
    if not path.exists():
        return None, (
            "the compiled core is not installed; with a C compiler, "
            "`python -m atomtrain.native.build` makes it"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the compiled core cannot be loaded ({error})"
    sources = library.atom_sources
    sources.restype = ctypes.c_char_p
    if sources().decode() != fingerprint():
        return None, (
            "the compiled core is not of these sources; `python -m atomtrain.native.build` "
            "makes it anew"
        )
    return library, ""


def level() -> str:
    named = torch.backends.cpu.get_cpu_capability()
    return named if named in ("AVX2", "AVX512") else "DEFAULT"


BLOCK = 128
"""Elements that pass at once; ranges begin at multiples of it."""
_float, _int32, _int64, _pointer = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Parameter(ctypes.Structure):
    _fields_ = (
        ("count", _int64),
        *((name, _int32) for name in ("values_kind", "gradient_kind", "moments_kind", "clipped")),
        *((name, _float) for name in ("coefficient", "factor")),
        *((name, _pointer) for name in ("values", "master", "gradient", "first", "second")),
        *((name, _pointer) for name in ("first_scale", "second_scale")),
    )


class AdamWNumbers(ctypes.Structure):
    """What AdamW multiplies by in one step."""

    _fields_ = tuple(
        (name, _float)
        for name in ("keep", "weight1", "beta2", "weight2", "root_correction", "eps", "step")
    )


class SGDNumbers(ctypes.Structure):
    """What SGD multiplies by in one step."""

    _fields_ = (
        *((name, _float) for name in ("lr", "weight_decay", "momentum", "share")),
        *((name, _int32) for name in ("nesterov", "first_step")),
    )


class Random(ctypes.Structure):
    _fields_ = (("first", _pointer), ("second", _pointer))


class Slices(ctypes.Structure):
    _fields_ = (("elements", _int64), ("random", _pointer))


VALUES = {
    (torch.float32, "float32"): 0,
    (torch.bfloat16, "float32"): 1,
    (torch.bfloat16, "split"): 2,
    (torch.float16, "float32"): 3,
}
"""Kinds of parameters, by their type and the format of the master."""
GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOMENTS = {"float32": 0, "bfloat16": 1, "int8": 2}


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
