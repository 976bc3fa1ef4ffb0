"""Which GPUs can be used, what they can do, and if one cannot be used, why, and what to do.

A torch that is built for ROCm calls AMD's GPUs `cuda` too; what differs is told apart here.

Their budget is counted against PyTorch's allocator: plans count tensors, the allocator reserves
whole segments from the driver. Between the two are its rounding, gaps between blocks, and what
kernels take that no operation returns. So part of a budget is kept out of plans. Segments that grow
(expandable ones) leave few gaps.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from atomtrain.errors import ConfigError, reason_of
from atomtrain.units import format_bytes

DRIVER = Path("/proc/driver/nvidia/version")
"""There where an NVIDIA driver is loaded."""
AMD_DRIVER = Path("/dev/kfd")
"""There where AMD's driver offers a GPU for computing."""
_TENSOR_CAPABILITY = (8, 0)
"""From here on NVIDIA's GPUs multiply bfloat16 and TF32 in hardware (Ampere, 2020)."""
_WITHOUT_BFLOAT16 = (
    "gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx10",
)  # fmt: skip
"""AMD's architectures that only emulate it: before CDNA, and RDNA before its third generation."""
_EMULATED = "Without a GPU use --device emulated:4GiB/s"
_FREE_SHARE = 0.9
"""Of what is free now: the default budget."""


def gpus() -> int:
    """Return the number of GPUs that can be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `why_none` says it in one line
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Card(NamedTuple):
    """A GPU."""

    name: str
    total_bytes: int
    cache_bytes: int
    """Of the largest cache."""


def card_of(device: torch.device | int) -> Card | None:
    """Return what a GPU is; `None` of what is not a GPU."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    return Card(str(card.name), int(card.total_memory), int(card.L2_cache_size))


def memory_of(index: int) -> tuple[str, int, int]:
    """Return a GPU's name, the bytes of its memory that nobody uses, and all."""
    return torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)


def names_gpu(device: str) -> bool:
    """Return whether what `--device` says is a GPU."""
    return device.startswith("cuda") or (device == "auto" and gpus() > 0)


def require_gpu(index: int) -> None:
    """Check that there is a GPU of this number.

    Raises:
        ConfigError: there is not; says why.
    """
    count = gpus()
    if index < count:
        return
    if not count:
        raise ConfigError(f"there is no CUDA device {index}: {why_none()}. {_EMULATED}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    last = "" if count == 1 else f" to cuda:{count - 1}"
    hidden = ""
    if "MIG" in visible:
        hidden = "; a process sees one MIG slice, so start one process for each"
    elif visible:
        hidden = f"; CUDA_VISIBLE_DEVICES={visible} hides the others"
    raise ConfigError(
        f"there is no CUDA device {index}; {count} are usable: give cuda:0{last}{hidden}"
    )


def capability(device: torch.device | int) -> tuple[int, int] | None:
    """Return a GPU's compute capability; `None` of what is not a GPU."""
    if isinstance(device, torch.device) and device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def on_rocm() -> bool:
    """Return whether GPUs are AMD's."""
    return torch.version.hip is not None


def runtime() -> str | None:
    """Return what torch is built to reach GPUs by, such as `CUDA 13.0` or `ROCm 7.0`."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def multiplies_bfloat16(device: torch.device | int) -> bool:
    """Return whether a GPU multiplies bfloat16 in hardware."""
    if on_rocm():
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        return not architecture.startswith(_WITHOUT_BFLOAT16)
    found = capability(device)
    return found is not None and found >= _TENSOR_CAPABILITY


def multiplies_tf32(device: torch.device | int) -> bool:
    """Return whether torch can have a GPU multiply float32 as TF32."""
    return not on_rocm() and multiplies_bfloat16(device)


def driver_is_there() -> bool:
    """Return whether this machine has a GPU's driver, whether torch can use it or not."""
    return DRIVER.exists() or AMD_DRIVER.exists()


def listing() -> str:
    """Return the command that lists GPUs and what uses them."""
    return "rocm-smi" if on_rocm() else "nvidia-smi"


def why_none() -> str:
    """Return why no GPU can be used, and what to do, as a part of a sentence."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    built = runtime()
    if built is None:
        wanted = "ROCm" if AMD_DRIVER.exists() and not DRIVER.exists() else "CUDA"
        return (
            f"torch {torch.__version__} is built without {wanted}; install one built for it "
            "(https://pytorch.org/get-started/locally)"
        )
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs; unset it"
    try:
        torch.cuda.init()
        reason = "torch finds none"
    except (RuntimeError, AssertionError) as error:
        reason = reason_of(error)
    if "too old" in reason:
        found = re.search(r"found version (\d+)", reason)
        version = int(found[1]) if found else 0
        has = f", this one has {version // 1000}.{version % 1000 // 10}" if version else ""
        return (
            f"the NVIDIA driver is too old: torch {torch.__version__} needs one for "
            f"{built}{has}; update the driver, or install an older torch"
        )
    if on_rocm():
        return (
            f"{reason}; rocm-smi must list the card, you must be in the groups video and render, "
            "and a container needs --device /dev/kfd --device /dev/dri; HIP_VISIBLE_DEVICES, if "
            "set, must name it"
        )
    if "no NVIDIA driver" in reason:
        return (
            "there is no NVIDIA driver; install it so that nvidia-smi lists the card, and start a "
            "container with --gpus all"
        )
    if visible is not None:
        return f"{reason}; CUDA_VISIBLE_DEVICES={visible} may name a card that is not there"
    return f"{reason}; nvidia-smi must list the card, and a container needs --gpus all"


def budget_of(index: int, wanted_bytes: int | None) -> int:
    """Return a GPU's budget in bytes.

    Args:
        index: Its number.
        wanted_bytes: `None` is 90% of what is free now.

    Raises:
        ConfigError: the GPU has less, or others use so much of it that less is free.
    """
    name, free_bytes, total_bytes = memory_of(index)
    # What this process has already it can use again.
    free_bytes = min(total_bytes, free_bytes + torch.cuda.memory_reserved(index))
    if wanted_bytes is None:
        return int(_FREE_SHARE * free_bytes)
    if wanted_bytes > total_bytes:
        slice_of = " (a MIG slice)" if " MIG " in name else ""
        raise ConfigError(
            f"--device-memory {format_bytes(wanted_bytes)} is more than {name}{slice_of} has, "
            f"{format_bytes(total_bytes)}; give at most {_size(_FREE_SHARE * free_bytes)}"
        )
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"--device-memory {format_bytes(wanted_bytes)} is more than is free: others use "
            f"{format_bytes(total_bytes - free_bytes)} of {name}; end them ({listing()} lists "
            f"them), or give at most {_size(_FREE_SHARE * free_bytes)}"
        )
    return wanted_bytes


def _size(n_bytes: float) -> str:
    """Return a size as options take it, rounded down."""
    return f"{int(n_bytes) >> 20}MiB"


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
