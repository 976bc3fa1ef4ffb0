"""A segment's parameters as views of a slot, and its gradients as views of a gradient buffer.

Each is made once and used from step to step: graphs that wait for backward hold the views with
which they were built.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.state.gradients import Collector, accept_wide
from atomtrain.engine.state.residents import Residents
from atomtrain.engine.state.store import gradient_view, view_of
from atomtrain.planning.plan.layout import Layout, Piece
from atomtrain.planning.plan.shape import Layers


class Views:
    """The views of all segments. What is resident is elsewhere, and not among them."""

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        residents: Residents,
        collector: Collector,
        *,
        slots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        one_memory: bool,
    ) -> None:
        """Make none yet.

        Args:
            chain: The model's layers.
            layout: Of the host store.
            residents: The blocks that have places of their own.
            collector: Takes the first gradient of each parameter.
            slots: uint8, 1-D; the arena itself where memory is one.
            gradients: The gradient buffers; the same.
            one_memory: Whether host and device memory are one.
        """
        self._chain, self._layout, self._residents = chain, layout, residents
        self._collector, self._one_memory = collector, one_memory
        self._slots, self._buffers = slots, gradients
        self._pieces: dict[tuple[Layers, bool], list[Piece]] = {}
        self._leaves: dict[tuple[Layers, int], dict[int, Tensor]] = {}
        self._gradients: dict[tuple[Layers, int], dict[int, Tensor]] = {}

    def leaves(self, layers: Layers, slot: int) -> dict[int, Tensor]:
        """Return the segment's parameters in a slot of the device, by `id`."""
        if (layers, slot) not in self._leaves:
            leaves: dict[int, Tensor] = {}
            for parameter, offset in self.places(layers):
                # Not a view to autograd: of a part of one, operations would not see without a graph
                # that it has a gradient, which decides between kernels.
                leaf = view_of(self._slots[slot], offset, parameter).detach()
                if self._one_memory:
                    # Updates write to other blocks of the arena while a graph holds this one, and
                    # autograd counts the changes of a tensor for all views of it.
                    leaf = leaf.data
                leaf.requires_grad_(parameter.requires_grad)
                accept_wide(leaf, self._layout.gradient_factor)
                if parameter.requires_grad:
                    hook = self._collector.hook(id(parameter))
                    leaf.register_post_accumulate_grad_hook(hook)
                leaves[id(parameter)] = leaf
            self._leaves[layers, slot] = leaves
        return self._leaves[layers, slot]

    def gradients(self, layers: Layers, buffer: int) -> dict[int, Tensor]:
        """Return where the gradients of a segment's parameters add up, by `id`."""
        if (layers, buffer) not in self._gradients:
            factor = self._layout.gradient_factor
            self._gradients[layers, buffer] = {
                id(parameter): gradient_view(self._buffers[buffer], offset, parameter, factor)
                for parameter, offset in self.places(layers, gradients=True)
            }
        return self._gradients[layers, buffer]

    def places(self, layers: Layers, gradients: bool = False) -> list[tuple[nn.Parameter, int]]:
        """Return the segment's parameters, each with its byte offset in a slot; or those that have
        gradients, with offsets in a gradient buffer."""
        unique = {
            id(parameter): parameter
            for layer in self._chain.layers[slice(*layers)]
            for parameter in layer.parameters.values()
            if id(parameter) not in self._residents.leaves
            and (parameter.requires_grad or not gradients)
        }
        layout = self._layout.gradients if gradients else self._layout
        places = []
        for parameter in unique.values():
            offset = layout.offsets[id(parameter)]
            for piece in self._pieces_of(layers, gradients):
                if piece.start_bytes <= offset < piece.stop_bytes:
                    places.append((parameter, offset - piece.start_bytes + piece.slot_bytes))
                    break
            else:  # a parameter without elements, at the very end of a range or alone in it
                places.append((parameter, 0))
        return places

    def moved_pieces(self, layers: Layers, gradients: bool = False) -> list[Piece]:
        """Return the pieces that are copied: none if the slot is the arena."""
        return [] if self._one_memory else self._pieces_of(layers, gradients)

    def _pieces_of(self, layers: Layers, gradients: bool) -> list[Piece]:
        """Return where the segment's blocks lie in the arena and a slot, or their gradients in
        those of gradients and a gradient buffer."""
        if (layers, gradients) not in self._pieces:
            layout = self._layout.gradients if gradients else self._layout
            pieces = layout.pieces(*layers, self._residents.blocks)
            if self._one_memory:  # the slot is the arena
                pieces = [piece._replace(slot_bytes=piece.start_bytes) for piece in pieces]
            self._pieces[layers, gradients] = pieces
        return self._pieces[layers, gradients]
