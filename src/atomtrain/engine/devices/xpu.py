"""Intel's GPUs, which torch calls `xpu`. Written by PyTorch's documentation; none has been tried.

`torch.xpu` cannot pin memory that is there already. So host memory stays ordinary, and every copy
passes through the few pinned buffers of its stream. What measures the link measures that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from atomtrain.engine.devices.vendor import Card, Vendor, built_without
from atomtrain.errors import ConfigError, reason_of

_DRIVER = Path("/dev/dri")
"""There where a driver offers a GPU of any maker."""


class Xpu(Vendor):
    """GPUs that torch calls `xpu`."""

    kind, title, mask, registers = "xpu", "XPU", "ZE_AFFINITY_MASK", False
    api = torch.xpu

    def driver_is_there(self) -> bool:
        # Many processors have a GPU of Intel's inside, so its driver alone says nothing.
        return torch.version.xpu is not None and _DRIVER.exists()

    def why_none(self) -> str:
        if torch.version.xpu is None:
            return built_without(self.title)
        try:
            self.api.init()
            reason = "torch finds none"
        except (RuntimeError, AssertionError) as error:
            reason = reason_of(error)
        visible = os.environ.get(self.mask)
        if visible is not None:
            return f"{reason}; {self.mask}={visible} may name a card that is not there"
        return (
            f"{reason}; sycl-ls must list the card, you must be in the groups video and render, "
            "and a container needs --device /dev/dri"
        )

    def runtime(self) -> str | None:
        return None if torch.version.xpu is None else f"XPU {torch.version.xpu}"

    def listing(self) -> str:
        return "xpu-smi"

    def card(self, gpu: torch.device | int) -> Card:
        found = self.api.get_device_properties(gpu)
        cache_bytes = getattr(found, "last_level_cache_size", 0)  # in newer ones
        return Card(str(found.name), int(found.total_memory), int(cache_bytes))

    def multiplies_bfloat16(self, gpu: torch.device | int) -> bool:
        """Return whether a GPU has the units for matrices (XMX), which have bfloat16."""
        found = self.api.get_device_properties(gpu)
        return bool(found.has_subgroup_matrix_multiply_accumulate)

    def prepare(self) -> None:
        if not hasattr(self.api, "get_per_process_memory_fraction"):
            raise ConfigError(
                f"torch {torch.__version__} cannot limit what it takes of an Intel GPU's memory; "
                "install a newer one"
            )

    def event(self, *, timed: bool = False) -> Any:
        return self.api.Event(enable_timing=timed)


XPU = Xpu()
