"""Leading layers that run on the host, straight from the host store.

An embedding has much to load and nothing to compute. On the host it gathers the rows that the
step's tokens touch, and only these cross the link, as its output; the vocabulary's matrix never
does. Backward adds the rows' gradients to the host's gradients, on the update thread.

| buffer | producer | consumer | released by |
|---|---|---|---|
| host parameters | update stream | the caller's thread | the blocks' `updated` events |
| output, on the host | the caller's thread | fetch stream | `Device.synchronize` before the next |
| its gradient, on the host | save stream | update stream | the next step's wait for the update |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from atomtrain.analysis.costs.storages import placed, placed_bytes, span_of
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.execution.boundary_activations import Saved
from atomtrain.engine.state.gradients import accept_wide
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.updates.shares import Delivery


class HostLayers:
    """Runs the first layers of a chain on the host."""

    def __init__(
        self, chain: Chain, count: int, store: HostStore, updates: Delivery, pool: HostPool
    ) -> None:
        """Run layers 0 to `count`."""
        self._chain, self._store, self._updates, self._pool = chain, store, updates, pool
        self.layers = 0, count
        self.writes = chain.writes(*self.layers)
        """The values that the layers hand on."""
        self.blocks = store.layout.blocks_of(*self.layers)
        """The blocks that they use."""
        self._unique = {
            id(parameter): parameter
            for layer in chain.layers[:count]
            for parameter in layer.parameters.values()
        }
        self._leaves: dict[int, Tensor] = {}
        self._edges: list[dict[str, GradientEdge]] = []
        self._lent: list[Tensor] = []

    def forward(
        self, micro_batches: Sequence[Mapping[str, Any]], training: bool
    ) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """Return each value with the pooled buffer behind it, by micro-batch and name."""
        for block in self.blocks:
            self._updates.updated[block].wait()
        for buffer in self._lent:  # the last step's gradients have been read
            self._pool.give(buffer)
        self._lent.clear()
        self._edges = []
        self._leaves = {
            key: parameter.detach().requires_grad_(training and parameter.requires_grad)
            for key, parameter in self._unique.items()
        }
        for leaf in self._leaves.values():
            accept_wide(leaf, self._store.layout.gradient_factor)
        results = []
        for micro_batch in micro_batches:
            # Copies: backward runs when the caller may already fill his with the next batch.
            inputs = {name: _copy(micro_batch[name]) for name in self._chain.reads(*self.layers)}
            with torch.set_grad_enabled(training):
                written = self._run(inputs)
            # Only the graph waits for backward, which runs none of the model's own code: that
            # could find the model in another mode by then.
            self._edges.append(
                {n: get_gradient_edge(written[n]) for n in self.writes if written[n].requires_grad}
            )
            result = {}
            for name in self.writes:
                value = written[name].detach()
                buffer = self._pool.take(placed_bytes(value))
                result[name] = placed(buffer, value), buffer
                span_of(result[name][0]).copy_(span_of(value))
            results.append(result)
        return results

    def backward(self, gradients: Sequence[Mapping[str, Saved]]) -> None:
        """Add to the host's gradients, in the background; then their blocks are updated."""
        leaves, edges = self._leaves, self._edges
        self._leaves, self._edges = {}, []
        saved = [item for of_one in gradients for item in of_one.values()]
        self._lent += [item.buffer for item in saved]
        after = [item.event for item in saved]
        for block in self.blocks:
            after += self._updates.events_of(block)
        # Of this step: the next one has a set of its own.
        touched = self._updates.touched

        def work() -> None:
            for key, parameter in self._unique.items():
                if key in touched:
                    leaves[key].grad = self._store.gradient(parameter)
            for roots, seeds in zip(edges, gradients, strict=True):
                if names := [name for name in seeds if name in roots]:
                    torch.autograd.backward(
                        [roots[name] for name in names], [seeds[name].value for name in names]
                    )
                    self._collect(leaves, touched)
            edges.clear()

        event = self._updates.stream.submit(work, after)
        self._updates.arrived(self.layers, self.blocks, event, set())

    def _collect(self, leaves: Mapping[int, Tensor], touched: set[int]) -> None:
        """Move first gradients to the store; autograd adds further ones there in place."""
        for key, parameter in self._unique.items():
            gradient = leaves[key].grad
            if gradient is not None and key not in touched:
                touched.add(key)
                place = self._store.gradient(parameter)
                place.copy_(gradient)
                leaves[key].grad = place

    def _run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(inputs)
        for layer in self._chain.layers[slice(*self.layers)]:
            own = {name: self._leaves[id(p)] for name, p in layer.parameters.items()}
            written = layer.run({**own, **layer.buffers}, [values[name] for name in layer.reads])
            values.update(zip(layer.writes, written, strict=True))
        return values


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
