"""How fast wire formats encode and decode on one core, compiled and with PyTorch.

What counts as fair here:

- *Encoding* is what a member does with a piece that it has just made: the bytes, the values that
  they decode to in place of the values and, where there is a residual, what was lost. *Decoding* is
  what an owner does with them.
- *Both paths* are timed in the same run and by turns, in an order that turns from round to round;
  medians are reported.
- *One core*: PyTorch may use one thread, and kernels have none of their own. The thread's processor
  time counts, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.native import library
from atomtrain.swarm.codecs.codec import Codec, codec_named
from atomtrain.swarm.codecs.names import CODEC_NAMES, FLOAT32, INT4, TOPK
from atomtrain.swarm.codecs.slices import SLICE_ELEMENTS

COMPILED, TORCH = "compiled", "torch"
_MEANS = {"mean-int8": INT4, "mean-topk": TOPK}
"""Means, by the format of the contributions."""


@dataclass(frozen=True, kw_only=True)
class CodecSetup:
    """Inputs of the benchmark."""

    elements: int = SLICE_ELEMENTS
    """Of a piece; as many as a slice of a large fragment has."""
    contributors: int = 4
    """In a mean."""
    rounds: int = 25
    """How often each is timed; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)


QUICK = CodecSetup(rounds=5)


def run(options: BenchmarkOptions, setup: CodecSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` chooses fewer rounds.
        setup: Inputs of one's own.
    """
    setup = setup or (QUICK if options.quick else CodecSetup())
    with _one_thread():
        seconds = _measure(setup, _paths())
    rates = {key: setup.elements / statistics.median(times_s) for key, times_s in seconds.items()}
    path, *others = _paths()
    result: Result = {"path": path}
    for at in (path, *others):
        prefix = "" if at == path else f"{at}_"
        for way in ("encode", "decode"):
            result[f"{prefix}{way}_elements_per_s"] = {
                name: rates[at, name, way] for name in _codecs(setup)
            }
    return {**result, "inputs": asdict(setup), **description()}


def _paths() -> list[str]:
    """Return the paths there are, the one that is used first."""
    return [TORCH] if library.core() is None else [COMPILED, TORCH]


def _codecs(setup: CodecSetup) -> dict[str, Codec]:
    found = {name: codec_named(name) for name in CODEC_NAMES if name != FLOAT32}
    means = {
        name: codec_named(of).for_mean(setup.contributors, setup.seed)
        for name, of in _MEANS.items()
    }
    return {**found, **means}


def _measure(setup: CodecSetup, paths: list[str]) -> dict[tuple[str, str, str], list[float]]:
    """Return the seconds of each round, by path, codec and way."""
    jobs = {
        (path, name, way): partial(_on, path, job)
        for name, codec in _codecs(setup).items()
        for way, job in _jobs(codec, _values(name, setup)).items()
        for path in paths
    }
    times_s: dict[tuple[str, str, str], list[float]] = {key: [] for key in jobs}
    for job in jobs.values():
        job()
    keys = list(jobs)
    for turn in range(setup.rounds):
        for index in range(len(keys)):
            key = keys[(index + turn) % len(keys)]
            times_s[key].append(jobs[key]())
        progress(f"round {turn + 1} of {setup.rounds}")
    return times_s


def _jobs(codec: Codec, values: Tensor) -> dict[str, Callable[[], float]]:
    """Return what encodes, and what decodes; each returns the seconds that it took."""
    piece, data = values.clone(), codec.encode(values)
    residual = torch.empty_like(values) if codec.feedback else None

    def encode() -> float:
        piece.copy_(values)
        return _timed(lambda: codec.encode(piece, piece, residual))

    return {"encode": encode, "decode": lambda: _timed(lambda: codec.decode(data, piece))}


def _values(name: str, setup: CodecSetup) -> Tensor:
    """Return what is encoded: numbers as of a change, or the mean of such contributions."""
    generator = torch.Generator().manual_seed(setup.seed)
    if name not in _MEANS:
        return torch.randn(setup.elements, generator=generator)
    total, decoded, codec = (
        torch.zeros(setup.elements), torch.empty(setup.elements), codec_named(_MEANS[name]),
    )  # fmt: skip
    for _ in range(setup.contributors):
        codec.encode(torch.randn(setup.elements, generator=generator), decoded)
        total += decoded
    return total / setup.contributors


def _on(path: str, job: Callable[[], float]) -> float:
    """Do it on this path; return what it returns."""
    if path == COMPILED:
        return job()
    with patch.object(library, "core", lambda: None):
        return job()


def _timed(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
