"""Where gradients add up, and in which type: that of their parameters, or float32.

A `GradientTracker` knows which gradients of a step have come to the host, block by block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.streams import Event
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.shape import Layers


def with_gradients_in(chain: Chain, gradient_dtype: str | None) -> Chain:
    """Return the chain with gradients that add up in float32, if that is asked for.

    Raises:
        ConfigError: a trainable parameter is neither float32 nor of 16 bits, some are and some are
            not of 16 bits, or this torch cannot.
    """
    if gradient_dtype is None:
        return chain
    sizes = {p.element_size() for p in chain.parameters if p.requires_grad}
    if sizes == {4}:
        return chain  # they do already
    if sizes != {2}:
        raise ConfigError(
            "gradient_dtype='float32' takes models whose trainable parameters are all of 16 or all "
            "of 32 bits; convert the model with model.bfloat16(), or choose precision='bf16'"
        )
    if not hasattr(torch.empty(0), "grad_dtype"):
        raise ConfigError(
            f"gradient_dtype='float32' needs torch 2.10 or newer, this is {torch.__version__}"
        )
    return dataclasses.replace(chain, gradient_factor=2)


def accept_wide(tensor: Tensor, factor: int) -> None:
    """Let autograd add a tensor's gradients in float32, and let it have such a gradient."""
    if factor > 1 and tensor.requires_grad:
        tensor.grad = None  # one of another type would be refused
        tensor.grad_dtype = torch.float32


Hook = Callable[[Tensor], None]


class Collector:
    """Moves each parameter's first gradient of a visit to its place; autograd adds further ones
    there."""

    def __init__(self, hold: Callable[[Event], None]) -> None:
        """`hold` makes compute wait for an event."""
        self.touched: set[int] = set()
        """The parameters that have had a gradient in this step, by `id`; others are never noted."""
        self.waiting: dict[int, Tensor] = {}
        """The places of the first gradients that have not come yet, by the parameter's `id`."""
        self.places_free: list[Event] = []
        """What the first one waits for, since the places may still be read."""
        self._hold = hold

    def add(self, key: int, leaf: Tensor, gradient: Tensor) -> None:
        """Do what autograd and the hook do with a gradient of a parameter, by its `id`."""
        self.touched.add(key)
        target = self.waiting.pop(key, None)
        if target is None:
            there = leaf.grad
            assert there is not None
            there.add_(gradient)
            return
        while self.places_free:
            self._hold(self.places_free.pop())
        target.copy_(gradient)
        leaf.grad = target

    def take(self, key: int, leaf: Tensor) -> Tensor | None:
        """Return the gradient that a parameter has, by its `id`, for backward to go on from; the
        whole comes to the same place. `None` if it has none, or a wide one."""
        gradient = leaf.grad
        if gradient is None or gradient.dtype is not leaf.dtype:
            return None
        self.waiting[key], leaf.grad = gradient, None
        return gradient

    def hook(self, key: int) -> Hook:
        """Return what a parameter calls when a gradient was added to it, by the parameter's `id`.

        It is for `register_post_accumulate_grad_hook`.
        """
        # Holds these only: one that held a tensor's owner would keep both alive as a cycle.
        touched, waiting = self.touched, self.waiting
        places_free, hold = self.places_free, self._hold

        def collect(leaf: Tensor) -> None:
            touched.add(key)
            target = waiting.pop(key, None)
            if target is not None:
                while places_free:
                    hold(places_free.pop())
                assert leaf.grad is not None
                target.copy_(leaf.grad)
                leaf.grad = target

        return collect


class GradientTracker:
    """The gradients of one step on their way to one place on the host."""

    def __init__(self, blocks: Sequence[Sequence[nn.Parameter]]) -> None:
        """`blocks` are the parameters of each block."""
        self._blocks = blocks
        self._waiting: list[set[Layers]] = []
        self._events: list[list[Event]] = []
        self.touched: set[int] = set()
        """The parameters that have gradients in this step, by `id`."""

    def begin(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step in which these segments deliver gradients of these blocks."""
        self._waiting = [set() for _ in self._blocks]
        for layers, blocks in deliveries.items():
            for block in blocks:
                self._waiting[block].add(layers)
        self._events = [[] for _ in self._blocks]
        self.touched = set()

    def has_gradient(self, block: int) -> bool:
        """Return whether part of the block's gradient came earlier in this step."""
        return any(id(p) in self.touched for p in self._blocks[block])

    def events_of(self, block: int) -> list[Event]:
        """Return the events after which the block's gradient so far is on the host."""
        return self._events[block]

    def note(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> list[int]:
        """Take note of a delivery; return the blocks of which it is the last one."""
        self.touched |= touched
        complete = []
        for block in blocks:
            self._events[block].append(event)
            self._waiting[block].discard(layers)
            if not self._waiting[block]:
                complete.append(block)
        return complete

    def order(self, deliveries: Mapping[Layers, Iterable[int]]) -> list[int]:
        """Return the blocks in the order in which they will be complete; call after `begin`."""
        waiting = [set(layers) for layers in self._waiting]
        order = []
        for layers, blocks in deliveries.items():
            for block in blocks:
                waiting[block].discard(layers)
                if not waiting[block]:
                    order.append(block)
        return order
