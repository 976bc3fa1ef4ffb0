"""The host store: parameters and gradients in flat buffers of exactly the needed size."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from atomtrain.analysis.costs.storages import is_dense
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import give_back
from atomtrain.engine.state.disk_parameters import DiskArena, Placement, StagedLoads
from atomtrain.engine.state.gradients import accept_wide
from atomtrain.errors import AnalysisError, ConfigError
from atomtrain.planning.plan.layout import HostGradients, Layout, every_gradient


class HostStore:
    """Owns the arenas; the model's own parameters become views into them.

    Where host and device memory are one there is no arena of gradients: each stays where autograd
    made it, and goes when it has been used.
    """

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        device: Device,
        placement: Placement | None = None,
        places: HostGradients | None = None,
    ) -> None:
        """Move the chain's parameters into the arena, one at a time.

        With a `placement` that says so, the arena of the parameters is a file. `places`: where
        gradients wait; `None` has a place for each.
        """
        self.layout = layout
        self.arena: DiskArena | None = None
        self.loads: StagedLoads | None = None
        if placement is not None and "parameters" in placement.use.on_disk:
            self.arena = DiskArena(placement.file, layout.total_bytes)
            piece_bytes = placement.use.load_piece_bytes
            self.loads = StagedLoads(self.arena, device, piece_bytes)
            self.parameters = self.arena.values  # [total_bytes] uint8
        else:
            self.parameters = device.host_empty(layout.total_bytes)  # [total_bytes] uint8
        self.keeps_gradients = not device.one_memory
        """Whether there is an arena of gradients."""
        stop_bytes = 0
        for parameter in sorted(chain.parameters, key=lambda p: layout.offsets[id(p)]):
            start_bytes = layout.offsets[id(parameter)]
            view = view_of(self.parameters, start_bytes, parameter)
            view.copy_(parameter.data)
            self._clear(stop_bytes, start_bytes)
            stop_bytes = start_bytes + parameter.nbytes
            # The old storage dies here, so host memory never holds a second copy of the model,
            # where pages come when they are first written to.
            parameter.data = view
            if parameter.requires_grad:
                accept_wide(parameter, layout.gradient_factor)
        self._clear(stop_bytes, layout.total_bytes)
        give_back()
        self.places = places or every_gradient(layout)
        """Where gradients wait."""
        self.gradients: Tensor  # [...] uint8
        self._make_gradients(chain, device)

    def _clear(self, start_bytes: int, stop_bytes: int) -> None:
        """Have zeros between parameters: what is averaged and saved has them in it."""
        if self.arena is None:
            self.parameters[start_bytes:stop_bytes].zero_()

    def beside(self, chain: Chain, device: Device) -> HostStore:
        """Return a store of the same parameters, with gradients of its own for another device."""
        other = copy.copy(self)
        if self.loads is not None:
            other.loads = self.loads.beside(device)
        other._make_gradients(chain, device)
        return other

    def place_gradients(self, chain: Chain, device: Device, places: HostGradients) -> None:
        """Have gradients wait elsewhere, between two steps; what waited is lost."""
        if places != self.places:
            self.places = places
            self._gradient_views.clear()
            self.gradients = self.gradients[:0].clone()  # first, so that there are never both
            self._make_gradients(chain, device)

    def _make_gradients(self, chain: Chain, device: Device) -> None:
        layout, starts = self.layout, self.places.starts
        gradient_bytes = self.places.total_bytes if self.keeps_gradients else 0
        self.gradients = device.host_empty(gradient_bytes)  # [...] uint8
        self._gradient_views: dict[int, Tensor] = {}
        self._gradient_starts: dict[int, int] = {}
        for block, at in starts.items():
            start, stop = layout.gradient_range(block)
            if start < stop:
                self._gradient_starts[start] = at
        for parameter in chain.parameters if self.keeps_gradients else ():
            block = layout.block_of[id(parameter)]
            if not parameter.requires_grad or block not in starts:
                continue
            self._gradient_views[id(parameter)] = gradient_view(
                self.gradients[starts[block] :],
                layout.gradients.offsets[id(parameter)] - layout.gradients.block_range(block)[0],
                parameter,
                layout.gradient_factor,
            )

    def gradients_of(self, start_bytes: int, stop_bytes: int) -> Tensor:
        """Return where the gradients of a run of blocks wait that leave together, `[...]` uint8.

        Args:
            start_bytes: Where the first one begins in the table of gradients.
            stop_bytes: Where the last one ends there.
        """
        at = self._gradient_starts.get(start_bytes, start_bytes)
        return self.gradients[at : at + stop_bytes - start_bytes]

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a trainable parameter's gradient, in the parameter's shape.

        Without an arena it must have been put there, in this step.
        """
        return self._gradient_views[id(parameter)]

    def put_gradient(self, key: int, gradient: Tensor) -> None:
        """Take over the gradient of a parameter, by the parameter's `id`; without an arena."""
        self._gradient_views[key] = gradient

    def drop_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Free gradients that were put here, now that they have been used."""
        if not self.keeps_gradients:
            for parameter in parameters:
                self._gradient_views.pop(id(parameter), None)

    def close(self) -> None:
        """Give up the gradients, and end the thread that reads parameters, if there is one."""
        if self.loads is not None:
            self.loads.close()
        self._gradient_views.clear()
        self.gradients = self.gradients[:0].clone()


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

    Raises:
        ConfigError: the offset is not a multiple of the size of an element.
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


def copy_on(device: Device, tensor: Tensor) -> Tensor:
    """Return a tensor's copy on the device, made inside `Device.computing`, in the same layout."""
    here = in_layout_of(device.empty((tensor.numel(),), tensor.dtype), tensor)
    return here.copy_(tensor)


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
