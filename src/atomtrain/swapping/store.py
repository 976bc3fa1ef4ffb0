"""The host store: parameters and gradients in flat buffers of exactly the needed size."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor, nn

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.storages import is_dense
from atomtrain.errors import AnalysisError, ConfigError
from atomtrain.planning.layout import Layout
from atomtrain.swapping.device import Device
from atomtrain.swapping.disk_parameters import DiskArena, StagedLoads
from atomtrain.swapping.disk_placement import Placement
from atomtrain.swapping.gradients import accept_wide
from atomtrain.swapping.streams import Inject

_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostStore:
    """Owns the arenas; the model's own parameters become views into them."""

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        device: Device,
        placement: Placement | None = None,
        inject: Inject | None = None,
    ) -> None:
        """Move the chain's parameters into the arena, one at a time.

        With a `placement` that says so, the arena of the parameters is a file.
        """
        self.layout = layout
        self.arena: DiskArena | None = None
        self.loads: StagedLoads | None = None
        if placement is not None and "parameters" in placement.use.on_disk:
            self.arena = DiskArena(placement.file, layout.total_bytes)
            piece_bytes = placement.use.load_piece_bytes
            self.loads = StagedLoads(self.arena, device, piece_bytes, inject)
            self.parameters = self.arena.values  # [total_bytes] uint8
        else:
            self.parameters = device.host_empty(layout.total_bytes)  # [total_bytes] uint8
            self.parameters.zero_()
        places, factor = layout.gradients, layout.gradient_factor
        self.gradients = device.host_empty(factor * places.total_bytes)  # [...] uint8
        self._gradient_views: dict[int, Tensor] = {}
        for parameter in chain.parameters:
            view = view_of(self.parameters, layout.offsets[id(parameter)], parameter)
            view.copy_(parameter.data)
            # The old storage dies here, so host memory never holds a second copy of the model.
            parameter.data = view
            if parameter.requires_grad:
                accept_wide(parameter, factor)
                self._gradient_views[id(parameter)] = gradient_view(
                    self.gradients, places.offsets[id(parameter)], parameter, factor
                )

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a trainable parameter's gradient in the arena, in the parameter's shape."""
        return self._gradient_views[id(parameter)]

    def close(self) -> None:
        """Give up the gradients, and end the thread that reads parameters, if there is one."""
        if self.loads is not None:
            self.loads.close()
        self._gradient_views.clear()
        self.gradients = self.gradients[:0].clone()

    def release_gradients(self, start_bytes: int, stop_bytes: int) -> None:
        """Give the memory of a range of gradients back; it reads as zeros until it is written to.

        Whole pages only. Not for memory that a device has pinned.
        """
        address = self.gradients.data_ptr()
        first = -(-(address + start_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + stop_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            _MADVISE(first, last - first, mmap.MADV_DONTNEED)


def require_data(chain: Chain) -> None:
    """Check that all parameters and buffers can be trained with, not only analysed.

    Raises:
        AnalysisError: one is on the meta device, so it has no data.
    """
    for layer in chain.layers:
        for name, tensor in (*layer.parameters.items(), *layer.buffers.items()):
            if tensor.is_meta:
                raise AnalysisError(
                    f"{chain.names.get(id(tensor), name)!r} is on the meta device and has no data; "
                    "build or load the model on the CPU"
                )


def view_of(buffer: Tensor, offset_bytes: int, like: Tensor) -> Tensor:
    """Return a view of a uint8 buffer with the shape and dtype of `like`.

    If `like` is dense the view has its strides: kernels add in another order for another layout.
    """
    if like.numel() == 0:
        return buffer[:0].view(like.dtype).view(like.shape)
    n_bytes = like.numel() * like.element_size()
    if offset_bytes % like.element_size():
        raise ConfigError(f"offset {offset_bytes} is not aligned for {like.dtype}")
    flat = buffer[offset_bytes : offset_bytes + n_bytes].view(like.dtype)
    return in_layout_of(flat, like)


def in_layout_of(flat: Tensor, like: Tensor) -> Tensor:
    """Return as many elements, 1-D and contiguous, in the shape and layout of `like`."""
    if like.is_contiguous() or not is_dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def gradient_view(
    buffer: Tensor, offset_bytes: int, parameter: nn.Parameter, factor: int
) -> Tensor:
    """Return a parameter's gradient in a uint8 buffer, with the parameter's strides.

    Args:
        buffer: Of gradients.
        offset_bytes: Where the parameter lies in its own buffer.
        parameter: Any; what is not trained has no gradient, but a place.
        factor: Bytes of a gradient over those of its parameter.
    """
    if factor == 1 or not parameter.requires_grad:
        return view_of(buffer, factor * offset_bytes, parameter)
    like = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=torch.float32, device="meta"
    )
    return view_of(buffer, factor * offset_bytes, like)
