"""NVIDIA's GPUs by CUDA, and AMD's: a torch that is built for ROCm calls them `cuda` too.

What differs between the two is told apart here.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from atomtrain.engine.devices.vendor import Card, Registrar, Vendor, built_without
from atomtrain.errors import ConfigError, reason_of

DRIVER = Path("/proc/driver/nvidia/version")
"""There where an NVIDIA driver is loaded."""
AMD_DRIVER = Path("/dev/kfd")
"""There where AMD's driver offers a GPU for computing."""
_TENSOR_CAPABILITY = (8, 0)
"""From here on NVIDIA's GPUs multiply bfloat16 and TF32 in hardware (Ampere, 2020)."""
_LEAST_COMPILED = (7, 0)
"""Of GPUs for which Triton compiles (Volta, 2017)."""
_WITHOUT_BFLOAT16 = (
    "gfx8", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx10",
)  # fmt: skip
"""AMD's architectures that only emulate it: before CDNA, and RDNA before its third generation."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs, since several may load from one copy."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (WORKSPACE, "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
"""In the order in which PyTorch looks for them: the later ones on ROCm only."""
_FIXED_WORKSPACES = (":4096:8", ":16:8")
"""With these cuBLAS adds in the same order on each stream (its documentation, section 2.1.4). The
first one is taken everywhere: eight buffers of 4 MiB, what PyTorch takes on Hopper."""
_COMPUTING_THREADS = 2
"""The caller's, and autograd's for backward: each has a handle of cuBLAS with its own workspace."""
_BESIDE_BYTES = 8 << 20
"""Workspaces of cuBLASLt, and other small things that PyTorch keeps."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def on_rocm() -> bool:
    """Return whether GPUs are AMD's."""
    return torch.version.hip is not None


class _Cudart:
    """CUDA's registration of host memory."""

    def __init__(self) -> None:
        self._runtime: Any = torch.cuda.cudart()

    def register(self, address: int, n_bytes: int) -> int:
        code = int(self._runtime.cudaHostRegister(address, n_bytes, _PORTABLE))
        if code:
            _clear_error()
        return code

    def unregister(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)


def _clear_error() -> None:
    """Have CUDA forget the last error, which the next kernel's launch would take for its own.

    PyTorch's binding has no cudaGetLastError, but asks it after each launch, and raises.
    """
    with contextlib.suppress(RuntimeError):
        torch.cuda._sleep(0)


class Cuda(Vendor):
    """GPUs that torch calls `cuda`."""

    kind, title, mask, registers = "cuda", "CUDA", "CUDA_VISIBLE_DEVICES", True
    api = torch.cuda

    def driver_is_there(self) -> bool:
        return DRIVER.exists() or AMD_DRIVER.exists()

    def why_none(self) -> str:
        visible = os.environ.get(self.mask)
        built = self.runtime()
        if built is None:
            rocm = AMD_DRIVER.exists() and not DRIVER.exists()
            return built_without("ROCm" if rocm else "CUDA")
        if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
            return f"{self.mask}={visible!r} hides all GPUs; unset it"
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
                f"{reason}; rocm-smi must list the card, you must be in the groups video and "
                "render, and a container needs --device /dev/kfd --device /dev/dri; "
                "HIP_VISIBLE_DEVICES, if set, must name it"
            )
        if "no NVIDIA driver" in reason:
            return (
                "there is no NVIDIA driver; install it so that nvidia-smi lists the card, and "
                "start a container with --gpus all"
            )
        if visible is not None:
            return f"{reason}; {self.mask}={visible} may name a card that is not there"
        return f"{reason}; nvidia-smi must list the card, and a container needs --gpus all"

    def runtime(self) -> str | None:
        if torch.version.hip is not None:
            return f"ROCm {torch.version.hip}"
        return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"

    def listing(self) -> str:
        return "rocm-smi" if on_rocm() else "nvidia-smi"

    def hidden(self) -> str:
        if "MIG" in os.environ.get(self.mask, ""):
            return "; a process sees one MIG slice, so start one process for each"
        return super().hidden()

    def card(self, gpu: torch.device | int) -> Card:
        found = torch.cuda.get_device_properties(gpu)
        return Card(str(found.name), int(found.total_memory), int(found.L2_cache_size))

    def capability(self, gpu: torch.device | int) -> tuple[int, ...]:
        return torch.cuda.get_device_capability(gpu)

    def multiplies_bfloat16(self, gpu: torch.device | int) -> bool:
        if on_rocm():
            architecture = str(torch.cuda.get_device_properties(gpu).gcnArchName)
            return not architecture.startswith(_WITHOUT_BFLOAT16)
        return self.capability(gpu) >= _TENSOR_CAPABILITY

    def bfloat16_takes(self, gpu: torch.device | int) -> str:
        if on_rocm():
            return ""
        return f" (compute capability {_version(self.capability(gpu))}, it takes 8.0)"

    def tf32_setting(self, gpu: torch.device | int) -> str | None:
        if on_rocm() or not self.multiplies_bfloat16(gpu):
            return None
        return (
            "set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment, or call "
            "torch.set_float32_matmul_precision('high') in Python"
        )

    def why_not_compiled(self, gpu: torch.device | int) -> str | None:
        found = self.capability(gpu)
        if found >= _LEAST_COMPILED:
            return None
        least = _version(_LEAST_COMPILED)
        return f"has compute capability {_version(found)}, and compiling takes {least}"

    def prepare(self) -> None:
        use_expandable_segments()

    def library_bytes(self) -> int:
        # Read when cuBLAS (on AMD's GPUs hipBLAS) is first used.
        names = _WORKSPACES if on_rocm() else _WORKSPACES[:1]
        chosen = next((os.environ[name] for name in names if os.environ.get(name)), None)
        if chosen is None:
            chosen = os.environ[WORKSPACE] = _FIXED_WORKSPACES[0]
        return workspace_bytes(chosen)

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True) if timed else torch.cuda.Event(blocking=True)

    def registrar(self) -> Registrar:
        return _Cudart()

    def require_deterministic(self) -> None:
        workspace = os.environ.get(WORKSPACE, _FIXED_WORKSPACES[0])
        # On AMD's GPUs PyTorch tells rocBLAS itself.
        if workspace not in _FIXED_WORKSPACES and not on_rocm():
            raise ConfigError(
                f"{WORKSPACE}={workspace} lets cuBLAS add in any order, which --deterministic "
                f"forbids; unset it, or set it to {' or '.join(_FIXED_WORKSPACES)}"
            )


def _version(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


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


def attention_kernels() -> tuple[bool, ...]:
    """Return which kernels attention may choose. PyTorch keeps that here for every device."""
    allowed = torch.backends.cuda
    return (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.math_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
    )


CUDA = Cuda()
