"""What a plan decides: two partitions, what stays on the device, and what is kept or recomputed."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple, get_args

from atomtrain.errors import PlanError

Boundary = Literal["device", "host"]
"""Where the values at a cut wait for the next segment."""
Activation = Literal["recompute", "keep", "offload"]
"""What backward needs of a segment's forward: computed again, kept on the device for all
micro-batches, or waiting on the host."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
Layers = tuple[int, int]
"""A range of layers: the first, and the one after the last."""


class Shape(NamedTuple):
    """One point of the search space; all that the executor must know beside sizes."""

    forward_bounds: tuple[int, ...]
    """Forward segment `s` holds layers `forward_bounds[s]` to `forward_bounds[s + 1]`; the last
    bound is where the turn begins."""
    backward_bounds: tuple[int, ...]
    """Backward segment `s` holds layers `backward_bounds[s]` to `backward_bounds[s + 1]`; the last
    segment is the turn, which runs forward and backward at once."""
    slots: int
    gradient_buffers: int
    boundary: Boundary = "device"
    resident_blocks: tuple[int, ...] = ()
    """Blocks with places of their own on the device, in increasing order. A number below that of
    the layers is a layer's own parameters, the ones from there on are the shared weights."""
    host_layers: int = 0
    """How many leading layers run on the host; both partitions begin behind them."""
    activations: tuple[Activation, ...] = ()
    """One for each backward segment; empty means that all are recomputed."""
    device_blocks: tuple[int, ...] = ()
    """Those of the resident blocks whose optimizer runs on the device, so that nothing of them
    crosses the link in a step."""
    early_blocks: tuple[int, ...] = ()
    """Those of the other resident blocks that come ahead of their first user, in equal pieces with
    each layer of forward."""
    remakes: bool = True
    """Whether offloaded segments make again in backward what cheap operations can, or send all that
    they save to the host."""

    @property
    def segments(self) -> int:
        """Number of backward segments, the turn included."""
        return len(self.backward_bounds) - 1

    @property
    def turn(self) -> Layers:
        """The turn segment."""
        return self.backward_bounds[-2], self.backward_bounds[-1]

    @property
    def waiting(self) -> dict[Layers, Activation]:
        """The segments whose graphs wait for backward, and where what is saved in them waits."""
        pairs = itertools.pairwise(self.backward_bounds)
        return {
            layers: activation
            for layers, activation in zip(pairs, self.activations, strict=False)
            if activation != "recompute"
        }

    def check(self, layers: int, blocks: int) -> None:
        """Check that the shape can be run on a chain of so many layers and blocks.

        Raises:
            PlanError: it cannot; says why.
        """
        if not 0 <= self.host_layers < layers:
            raise PlanError(
                f"host_layers is {self.host_layers}; it must be at least 0 and below the number "
                f"of layers, {layers}"
            )
        start = self.backward_bounds[-2] if len(self.backward_bounds) > 1 else -1
        for name, bounds, stop in (
            ("forward_bounds", self.forward_bounds, start),
            ("backward_bounds", self.backward_bounds, layers),
        ):
            rising = all(low < high for low, high in itertools.pairwise(bounds))
            if not bounds or bounds[0] != self.host_layers or bounds[-1] != stop or not rising:
                raise PlanError(
                    f"{name} are {list(bounds)}; they must rise from {self.host_layers} to "
                    f"{max(stop, 0)}"
                )
        if self.slots < 1 or self.gradient_buffers < 1:
            raise PlanError("a plan has at least one slot and one gradient buffer")
        resident = self.resident_blocks
        if list(resident) != sorted(set(resident)) or not all(0 <= b < blocks for b in resident):
            raise PlanError(
                f"resident_blocks are {list(resident)}; they must rise within 0 to {blocks - 1}"
            )
        device = self.device_blocks
        if list(device) != sorted(set(device)) or not set(device) <= set(resident):
            raise PlanError(
                f"device_blocks are {list(device)}; they must rise, and be among the resident "
                f"blocks {list(resident)}"
            )
        early = self.early_blocks
        loaded = set(resident) - set(device)
        if list(early) != sorted(set(early)) or not set(early) <= loaded:
            raise PlanError(
                f"early_blocks are {list(early)}; they must rise, and be among the resident blocks "
                f"that are not updated on the device, {sorted(loaded)}"
            )
        if self.activations and len(self.activations) != self.segments:
            raise PlanError(
                f"there are {len(self.activations)} activations for {self.segments} segments; "
                "give one for each backward segment"
            )
        ahead = set(itertools.pairwise(self.forward_bounds))
        for pair, activation in self.waiting.items():
            if pair not in ahead:
                raise PlanError(
                    f"the backward segment of layers {pair[0]} to {pair[1] - 1} cannot "
                    f"{activation} what its forward saves, because it is no forward segment; let "
                    "both partitions have it, or recompute it"
                )
