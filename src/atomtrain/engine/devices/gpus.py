"""Whose GPUs there are, and how a budget of their memory is held.

A budget is counted against PyTorch's allocator: plans count tensors, the allocator reserves
whole segments from the driver. Between the two are its rounding, gaps between blocks, and what
kernels take that no operation returns. So part of a budget is kept out of plans. Segments that grow
(expandable ones) leave few gaps.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from atomtrain.engine.devices import cuda
from atomtrain.engine.devices.device_names import GPU_KINDS, parse_devices
from atomtrain.engine.devices.vendor import Card, Vendor
from atomtrain.engine.devices.xpu import XPU
from atomtrain.errors import ConfigError
from atomtrain.units import format_bytes

VENDORS: tuple[Vendor, ...] = (cuda.CUDA, XPU)
"""In the order in which `auto` looks for a GPU. A torch is built for one of them."""
attention_kernels = cuda.attention_kernels
_EMULATED = "Without a GPU use --device emulated:4GiB/s"
_FREE_SHARE = 0.9
"""Of what is free now: the default budget."""


def vendor_here() -> Vendor | None:
    """Return whose GPUs can be used; `None` if there are none."""
    return next((vendor for vendor in VENDORS if vendor.count()), None)


def vendor_of(device: torch.device) -> Vendor | None:
    """Return whose GPU a device is; `None` of what is not a GPU."""
    return next((vendor for vendor in VENDORS if vendor.kind == device.type), None)


def vendor_named(kind: str) -> Vendor | None:
    """Return whose GPUs a name's kind asks for; `None` if it asks for none, or finds none."""
    if kind == "auto":
        return vendor_here()
    return next((vendor for vendor in VENDORS if vendor.kind == kind), None)


def names_gpu(device: str) -> bool:
    """Return whether what `--device` says is a GPU."""
    return device.startswith(GPU_KINDS) or (device == "auto" and vendor_here() is not None)


def card_of(device: torch.device) -> Card | None:
    """Return what a GPU is; `None` of what is not a GPU."""
    vendor = vendor_of(device)
    return None if vendor is None else vendor.card(device)


def driver_is_there() -> bool:
    """Return whether this machine has a GPU's driver, whether torch can use it or not."""
    return any(vendor.driver_is_there() for vendor in VENDORS)


def why_none() -> str:
    """Return why no GPU can be used, and what to do, as a part of a sentence."""
    there = (vendor for vendor in VENDORS if vendor.driver_is_there())
    return next(there, VENDORS[0]).why_none()


def library_bytes(device: str) -> int:
    """Return what libraries keep of the budget of what `--device` says."""
    vendor = vendor_named(device.partition(",")[0].partition(":")[0])
    return 0 if vendor is None else vendor.library_bytes()


def require_gpu(vendor: Vendor, index: int) -> None:
    """Check that there is a GPU of this number.

    Raises:
        ConfigError: there is not; says why.
    """
    count = vendor.count()
    if index < count:
        return
    if not count:
        raise ConfigError(
            f"there is no {vendor.title} device {index}: {vendor.why_none()}. {_EMULATED}"
        )
    last = "" if count == 1 else f" to {vendor.kind}:{count - 1}"
    raise ConfigError(
        f"there is no {vendor.title} device {index}; {count} are usable: give {vendor.kind}:0"
        f"{last}{vendor.hidden()}"
    )


def require_gpus(devices: str) -> None:
    """Check that there are the GPUs that `--device` names; starts no driver.

    Raises:
        ConfigError: there are not; says why.
    """
    for one in parse_devices(devices):
        vendor = vendor_named(one.kind)
        if vendor is not None and one.kind in GPU_KINDS:
            require_gpu(vendor, one.number)


def budget_of(vendor: Vendor, index: int, wanted_bytes: int | None) -> int:
    """Return a GPU's budget in bytes.

    Args:
        vendor: Whose GPU it is.
        index: Its number.
        wanted_bytes: `None` is 90% of what is free now.

    Raises:
        ConfigError: the GPU has less, or others use so much of it that less is free.
    """
    name, free_bytes, total_bytes = vendor.memory(index)
    # What this process has already it can use again.
    free_bytes = min(total_bytes, free_bytes + int(vendor.api.memory_reserved(index)))
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
            f"{format_bytes(total_bytes - free_bytes)} of {name}; end them ({vendor.listing()} "
            f"lists them), or give at most {_size(_FREE_SHARE * free_bytes)}"
        )
    return wanted_bytes


def _size(n_bytes: float) -> str:
    """Return a size as options take it, rounded down."""
    return f"{int(n_bytes) >> 20}MiB"


_LEAST_SPARE_BYTES = 256 << 20
_SPARE_SHARE = 0.03
_SMALL_BUDGET_BYTES = 1 << 30
"""Up to here, which is for trials, what is spare is not taken from the budget but added to it."""


class Split(NamedTuple):
    """How a budget is divided, in bytes."""

    reserved_bytes: int
    """Of the budget, what plans cannot use."""
    cap_bytes: int
    """What the allocator may reserve from the driver. From 1.26 GiB on it is the budget."""


def split_of(budget_bytes: int, total_bytes: int, kept_bytes: int) -> Split:
    """Return how a budget is divided.

    Args:
        budget_bytes: Of one device.
        total_bytes: Of the GPU.
        kept_bytes: What libraries keep of the budget.
    """
    spare = max(_LEAST_SPARE_BYTES, int(_SPARE_SHARE * budget_bytes))
    inside = min(spare, max(0, budget_bytes - _SMALL_BUDGET_BYTES))
    cap_bytes = min(total_bytes, budget_bytes + spare - inside)
    return Split(kept_bytes + inside, cap_bytes)


class Caps:
    """How much of each GPU this process may take: the budgets of its open devices together, and
    when the last one is closed as much as before the first one."""

    def __init__(self, api: Any) -> None:
        """Know of none; `api` is PyTorch's module for the GPUs."""
        self._api = api
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}
        self._before: dict[int, float] = {}

    def add(self, index: int, n_bytes: int) -> None:
        """Take note of a device that was opened on GPU `index`."""
        with self._lock:
            budgets = self._open.setdefault(index, [])
            if not budgets:
                self._before[index] = self._api.get_per_process_memory_fraction(index)
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
            _, total_bytes = self._api.mem_get_info(index)
            share = min(1.0, sum(budgets) / total_bytes)
        self._api.set_per_process_memory_fraction(share, index)


CAPS = {vendor.kind: Caps(vendor.api) for vendor in VENDORS}
