"""A GPU's budget and PyTorch's allocator: what libraries keep, what is spare, and the cap.

Plans count tensors, the allocator reserves whole segments from the driver. Between the two are its
rounding, gaps between blocks, and what kernels take that no operation returns. So part of a budget
is kept out of plans. Segments that grow (expandable ones) leave few gaps.
"""

from __future__ import annotations

import os
import re
import threading
from typing import NamedTuple

import torch

from atomtrain.engine.devices.gpus import on_rocm

_CUBLAS_WORKSPACE = ":4096:8"
"""The same everywhere: eight buffers of 4 MiB, what PyTorch takes on Hopper, and with which cuBLAS
adds in the same order each time."""
_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
"""In the order in which PyTorch looks for them: the later ones on ROCm only."""
_COMPUTING_THREADS = 2
"""The caller's, and autograd's for backward: each has a handle of cuBLAS with its own workspace."""
_BESIDE_BYTES = 8 << 20
"""Workspaces of cuBLASLt, and other small things that PyTorch keeps."""
_LEAST_SPARE_BYTES = 256 << 20
_SPARE_SHARE = 0.03
_SMALL_BUDGET_BYTES = 1 << 30
"""Up to here, which is for trials, what is spare is not taken from the budget but added to it."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Split(NamedTuple):
    """How a budget is divided, in bytes."""

    reserved_bytes: int
    """Of the budget, what plans cannot use."""
    cap_bytes: int
    """What the allocator may reserve from the driver. From 1.26 GiB on it is the budget."""


def split_of(budget_bytes: int, total_bytes: int) -> Split:
    """Return how a budget is divided; from now on cuBLAS's workspace is what this says.

    Args:
        budget_bytes: Of one device.
        total_bytes: Of the GPU.
    """
    spare = max(_LEAST_SPARE_BYTES, int(_SPARE_SHARE * budget_bytes))
    inside = min(spare, max(0, budget_bytes - _SMALL_BUDGET_BYTES))
    cap_bytes = min(total_bytes, budget_bytes + spare - inside)
    return Split(library_bytes() + inside, cap_bytes)


def library_bytes() -> int:
    """Return what libraries keep of a GPU's budget; from now on cuBLAS's workspace is that."""
    # Read when cuBLAS (on AMD's GPUs hipBLAS) is first used.
    names = _WORKSPACES if on_rocm() else _WORKSPACES[:1]
    chosen = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if chosen is None:
        chosen = os.environ[_WORKSPACES[0]] = _CUBLAS_WORKSPACE
    return workspace_bytes(chosen)


def workspace_bytes(config: str) -> int:
    """Return what cuBLAS and cuBLASLt keep for themselves through PyTorch's allocator.

    Args:
        config: The environment variable `CUBLAS_WORKSPACE_CONFIG`, such as `:4096:8`: buffers of so
            many KiB, and how many of them.
    """
    sizes = re.findall(r":([0-9]+):([0-9]+)", config)
    kept = sum(int(kib) * int(count) << 10 for kib, count in sizes)
    return _COMPUTING_THREADS * kept + _BESIDE_BYTES


def use_expandable_segments() -> bool:
    """Let the allocator's segments grow, unless the user has chosen settings of his own.

    Call it before CUDA starts. Returns whether it was done.
    """
    if any(os.environ.get(name) for name in _SETTINGS):
        return False
    # The environment may have been read when torch was loaded, so it is told.
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.9 or so
    (tell or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    return True


class Caps:
    """How much of each GPU this process may take: the budgets of its open devices together, and
    when the last one is closed as much as before the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}
        self._before: dict[int, float] = {}

    def add(self, index: int, n_bytes: int) -> None:
        """Take note of a device that was opened on GPU `index`."""
        with self._lock:
            budgets = self._open.setdefault(index, [])
            if not budgets:
                self._before[index] = torch.cuda.get_per_process_memory_fraction(index)
            budgets.append(n_bytes)
            self._apply(index)

    def remove(self, index: int, n_bytes: int) -> None:
        """Take note of a device that was closed."""
        with self._lock:
            self._open[index].remove(n_bytes)
            self._apply(index)

    def _apply(self, index: int) -> None:
        budgets, share = self._open[index], self._before[index]
        if budgets:
            _, total_bytes = torch.cuda.mem_get_info(index)
            share = min(1.0, sum(budgets) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, index)


CAPS = Caps()
