"""Host memory for what waits there during a step: taken once, then reused from step to step.

Pinning memory is slow, goes by whole pages, and a page cannot be pinned twice. So small buffers are
cut from slabs, and large ones have pages of their own.
"""

from __future__ import annotations

from torch import Tensor

from atomtrain.engine.devices.device import Device

SLAB_BYTES = 1 << 20
_LARGE_BYTES = SLAB_BYTES // 4
_ALIGNED_BYTES = 512


class HostPool:
    """Gives and takes back uint8 buffers from which a device copies fast."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self._slabs: list[Tensor] = []
        """What is left of each slab: the next small buffer is cut from the first in which it fits,
        since sizes differ by hundreds, and a slab may be left with nearly a quarter."""
        self.total_bytes = 0
        """Bytes of all buffers that were ever needed at once; none is given back."""

    def take(self, n_bytes: int) -> Tensor:
        """Return a uint8 buffer of exactly this size."""
        if free := self._free.get(n_bytes):
            return free.pop()
        self.total_bytes += n_bytes
        if n_bytes > _LARGE_BYTES:
            return self._device.host_empty(n_bytes)
        index = next((i for i, s in enumerate(self._slabs) if s.numel() >= n_bytes), None)
        slab = self._device.host_empty(SLAB_BYTES) if index is None else self._slabs.pop(index)
        rest = slab[-(-n_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES :]
        if rest.numel():
            self._slabs.append(rest)
        return slab[:n_bytes]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; nobody may use it any more."""
        self._free.setdefault(buffer.numel(), []).append(buffer)
