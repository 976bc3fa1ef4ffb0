"""How fast optimizers update parameters on the host, against plain copies of as many bytes.

An update computes little, so memory is its bound: it cannot be faster than its bytes can be moved.
What counts as fair here:

- *Bytes* are what must pass: the parameter is read and written, the gradient read, the state read
  and written. Scratch memory is not counted; it costs time only.
- *Copies* are `Tensor.copy_` between tensors of the same sizes, which reads and writes each byte
  once, with the same threads. The bound for a step is the time that copies take to move as many
  bytes. A share can exceed 1: a copy writes where it has not read, and most processors fetch such
  memory first, which is not counted; an update writes only what it has read.
- *Masters*: names with `bf16` are updates of bfloat16 parameters with bfloat16 gradients, whose
  exact masters are whole or split, so that the bytes and what a split costs can be compared.
- *Interleaved*: in each round every optimizer makes one step and the copies run once, in an order
  that turns from round to round; a share compares a step with the copies of its own round, and
  the median over rounds is reported.
- *Fused*: `share_of_fused` compares parameters a second with `torch.optim.AdamW(fused=True)` on
  float32 parameters, in the same round.
- *Products*: Muon's update is arithmetic. `flops_per_s` is what its matrix products reach,
  `share_of_products` that over one plain product of a matrix with its transpose in the same round.
- *Clipped*: names that end so read each gradient times a coefficient below 1, rounded to its own
  type. `clipped_over_unclipped` is the time of such an update over the same one without; the norm
  is not in it. Where memory is the bound it is 1. With split masters arithmetic is: the rounding's
  four instructions stand beside 43 (bfloat16 moments) or 75 (int8) for 16 elements (AVX-512).
- *Out of cache*: all tensors together are much larger than the processor's caches.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atomtrain.optimizers import BYTES_PER_PARAMETER, MASTER_BYTES, SGD, AdamW, Muon, elementwise

_PASSES = 3
"""Over what is of the parameter's size: it is read and written, its gradient is read."""
_COEFFICIENT = 0.75
"""Exact in bfloat16; often repeated, it leaves gradients that a rewriting update makes small."""
_CLIPPED = "-clipped"
_FUSED = "torch-adamw-fused"
_MEASURED = "adamw"
"""The optimizer whose numbers stand at the top of the result."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSetup:
    """Inputs of the benchmark."""

    matrices: int = 8
    """Parameters of the model; at least 1."""
    rows: int = 1024
    columns: int = 4096
    rounds: int = 15
    """How often each step is timed; at least 1."""
    but: tuple[str, ...] = ()
    """Optimizers that are left out; `adamw` and `torch-adamw-fused` cannot be."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return self.matrices * self.rows * self.columns


QUICK = OptimizerSetup(matrices=4, rounds=3)


class _Candidate(NamedTuple):
    """An optimizer to time."""

    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    state_bytes: float
    """Of one parameter, with its master if it is bfloat16."""
    most_matrices: int | None = None
    """Update no more than so many: enough for one that takes seconds. `None` is all."""
    dtype: torch.dtype = torch.float32
    """Of parameters and gradients."""
    clips: bool = False
    """Whether gradients are clipped on the way."""

    @property
    def moved_bytes(self) -> float:
        """Bytes a step reads and writes for one parameter."""
        return _PASSES * self.dtype.itemsize + 2 * self.state_bytes


def _of_streams(state: str, master: str, *, clips: bool = False) -> _Candidate:
    """Return the AdamW of bfloat16 parameters with masters."""
    return _Candidate(
        lambda p: _clipping(AdamW(p, state=state, master=master), clips),
        BYTES_PER_PARAMETER[state] + MASTER_BYTES[master],
        dtype=torch.bfloat16,
        clips=clips,
    )


def _clipping(optimizer: AdamW, clips: bool) -> AdamW:
    if clips:
        optimizer.clip_coefficient = torch.tensor(_COEFFICIENT)
    return optimizer


_CANDIDATES: dict[str, _Candidate] = {
    "adamw": _Candidate(AdamW, BYTES_PER_PARAMETER["float32"]),
    "adamw-bfloat16": _Candidate(
        lambda p: AdamW(p, state="bfloat16"), BYTES_PER_PARAMETER["bfloat16"]
    ),
    "adamw-int8": _Candidate(lambda p: AdamW(p, state="int8"), BYTES_PER_PARAMETER["int8"]),
    "bf16-adamw": _of_streams("float32", "float32"),
    "bf16-adamw-split": _of_streams("float32", "split"),
    "bf16-adamw-bfloat16": _of_streams("bfloat16", "float32"),
    "bf16-adamw-bfloat16-split": _of_streams("bfloat16", "split"),
    "bf16-adamw-int8": _of_streams("int8", "split"),
    f"adamw{_CLIPPED}": _Candidate(
        lambda p: _clipping(AdamW(p), True), BYTES_PER_PARAMETER["float32"], clips=True
    ),
    f"bf16-adamw{_CLIPPED}": _of_streams("float32", "float32", clips=True),
    f"bf16-adamw-bfloat16-split{_CLIPPED}": _of_streams("bfloat16", "split", clips=True),
    f"bf16-adamw-int8{_CLIPPED}": _of_streams("int8", "split", clips=True),
    "muon": _Candidate(lambda p: Muon([{"params": p, "algorithm": "muon"}]), 4.0, 1),
    "sgd-momentum": _Candidate(lambda p: SGD(p, lr=1e-3, momentum=0.9), 4.0),
    _FUSED: _Candidate(lambda p: torch.optim.AdamW(p, fused=True), 8.0),
    "torch-adamw-foreach": _Candidate(lambda p: torch.optim.AdamW(p, foreach=True), 8.0),
}


def run(options: BenchmarkOptions, setup: OptimizerSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` chooses smaller inputs.
        setup: Inputs of one's own.
    """
    setup = setup or (QUICK if options.quick else OptimizerSetup())
    torch.manual_seed(setup.seed)
    load_average = os.getloadavg()[0]
    times_s = _measure(setup)
    copies_s, products_s = times_s.pop("copy"), times_s.pop("product")
    rows = {name: _row(name, setup, times_s, copies_s) for name in times_s}
    if "muon" in rows:
        rows["muon"] |= _products(setup, times_s["muon"], products_s)
    return {
        "parameters_per_s": rows[_MEASURED]["parameters_per_s"],
        "copy_bytes_per_s": _copied_bytes(setup) / statistics.median(copies_s),
        "share_of_copy_bound": rows[_MEASURED]["share_of_copy_bound"],
        "optimizers": rows,
        "parameters": setup.parameters,
        # Processes that wanted to run in the minute before: 0 on a quiet machine.
        "load_average": load_average,
        "threads": torch.get_num_threads(),
        "inputs": {**asdict(setup), "but": [*setup.but]},
        **description(),
    }


def _row(
    name: str, setup: OptimizerSetup, times_s: dict[str, list[float]], copies_s: list[float]
) -> Result:
    candidate, steps_s = _CANDIDATES[name], times_s[name]
    parameters = setup.rows * setup.columns * _matrices(candidate, setup)
    moved_bytes = candidate.moved_bytes * parameters
    shares = [
        moved_bytes / _copied_bytes(setup) * copy_s / step_s
        for copy_s, step_s in zip(copies_s, steps_s, strict=True)
    ]
    step_s = statistics.median(steps_s)
    fused = setup.parameters / parameters
    row = {
        "step_s": step_s,
        "path": _path(candidate),
        "parameters_per_s": parameters / step_s,
        "share_of_copy_bound": statistics.median(shares),
        "share_of_fused": _median_ratio(times_s[_FUSED], steps_s) / fused,
        "state_bytes_per_parameter": candidate.state_bytes,
        "moved_bytes_per_parameter": candidate.moved_bytes,
        "parameters": parameters,
    }
    if candidate.clips:
        unclipped_s = times_s[name.removesuffix(_CLIPPED)]
        row["clipped_over_unclipped"] = _median_ratio(steps_s, unclipped_s)
    return row


def _products(setup: OptimizerSetup, steps_s: list[float], products_s: list[float]) -> Result:
    """Return what Muon's products reach, beside one plain product."""
    matrix = nn.Parameter(torch.empty(setup.rows, setup.columns, device="meta"))
    flops = Muon([{"params": [matrix], "algorithm": "muon"}]).flops_of(matrix)
    plain = 2 * setup.rows**2 * setup.columns
    return {
        "flops_per_s": flops / statistics.median(steps_s),
        "share_of_products": flops / plain * _median_ratio(products_s, steps_s),
    }


def _median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median over rounds of one time over the other of the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _path(candidate: _Candidate) -> str:
    """Return who does the arithmetic: the compiled core, or PyTorch."""
    parameter = _parameter(torch.zeros(1, 1), torch.zeros(1, 1), candidate.dtype)
    optimizer = candidate.make([parameter])
    known = {AdamW: elementwise.ADAMW_PATHS, SGD: elementwise.SGD_PATHS}
    if not isinstance(optimizer, AdamW | SGD):
        return "torch"
    group = optimizer.param_groups[0]
    return known[type(optimizer)].name(parameter, group, optimizer.scaling)


def _measure(setup: OptimizerSetup) -> dict[str, list[float]]:
    """Return the seconds of each round, by name; `copy` are the plain copies, `product`
    is a plain product."""
    shape = (setup.rows, setup.columns)
    gradients = [torch.randn(shape) * 1e-2 for _ in range(setup.matrices)]
    targets = [torch.empty(shape) for _ in gradients]
    jobs: dict[str, Callable[[], object]] = {
        "copy": lambda: _copy(targets, gradients),
        "product": lambda: gradients[0] @ gradients[0].T,
    }
    # All of one type update the same parameters: their values do not matter, the memory does.
    parameters = {
        dtype: [_parameter(torch.randn(shape) * 0.02, gradient, dtype) for gradient in gradients]
        for dtype in (torch.float32, torch.bfloat16)
    }
    for name, candidate in _CANDIDATES.items():
        if name in setup.but:
            continue
        owned = parameters[candidate.dtype][: _matrices(candidate, setup)]
        jobs[name] = candidate.make(owned).step
    times_s: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()  # makes state and scratch
    names = list(jobs)
    for turn in range(setup.rounds):
        for index in range(len(names)):
            name = names[(index + turn) % len(names)]
            started_s = time.perf_counter()
            jobs[name]()
            times_s[name].append(time.perf_counter() - started_s)
        took = (f"{name} {seconds[-1] * 1e3:.0f} ms" for name, seconds in times_s.items())
        progress(f"round {turn + 1} of {setup.rounds}: {', '.join(took)}")
    return times_s


def _parameter(values: Tensor, gradient: Tensor, dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(values.to(dtype))
    parameter.grad = gradient.to(dtype)
    return parameter


def _matrices(candidate: _Candidate, setup: OptimizerSetup) -> int:
    return min(setup.matrices, candidate.most_matrices or setup.matrices)


def _copied_bytes(setup: OptimizerSetup) -> int:
    """Return the bytes that the copies of one round read and write."""
    return 2 * 4 * setup.parameters


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
