"""Leading layers that run on the host, straight from the host store.

An embedding has much to load and nothing to compute. On the host it gathers the rows that the
step's tokens touch, and only these cross the link, as its output; the vocabulary's matrix never
does. Backward adds the rows' gradients to the host's gradients, on the update thread.

| buffer | producer | consumer | released by |
|---|---|---|---|
| host parameters | update stream | the caller's thread | the blocks' `updated` events |
| output, on the host | the caller's thread | fetch stream | the end of the step |
| its gradient, on the host | save stream | update stream | the next step's wait for the update |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.chain import Chain
from atomtrain.swapping.carried import HostPool, Saved
from atomtrain.swapping.store import HostStore, view_of
from atomtrain.swapping.updates import Updates


class HostLayers:
    """Runs the first layers of a chain on the host."""

    def __init__(
        self, chain: Chain, count: int, store: HostStore, updates: Updates, pool: HostPool
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
        self._inputs: list[dict[str, Any]] = []
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
        self._inputs = []
        results = []
        frozen = {key: parameter.detach() for key, parameter in self._unique.items()}
        for micro_batch in micro_batches:
            inputs = {name: micro_batch[name] for name in self._chain.reads(*self.layers)}
            with torch.no_grad():
                written = self._run(inputs, frozen)
            result = {}
            for name in self.writes:
                buffer = self._pool.take(written[name].nbytes)
                result[name] = view_of(buffer, 0, written[name]), buffer
                result[name][0].copy_(written[name])
            results.append(result)
            if training:
                # Copies: backward runs when the caller may already fill them with the next batch.
                self._inputs.append(
                    {n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}
                )
        return results

    def backward(self, gradients: Sequence[Mapping[str, Saved]]) -> None:
        """Add to the host's gradients, in the background; then their blocks are updated."""
        inputs, self._inputs = self._inputs, []
        saved = [item for of_one in gradients for item in of_one.values()]
        self._lent += [item.buffer for item in saved]
        after = [item.event for item in saved]
        for block in self.blocks:
            after += self._updates.arrivals_of(block)
        # Of this step: the next one has a set of its own.
        touched = self._updates.touched
        leaves = {
            key: parameter.detach().requires_grad_(parameter.requires_grad)
            for key, parameter in self._unique.items()
        }

        def work() -> None:
            for key, parameter in self._unique.items():
                if key in touched:
                    leaves[key].grad = self._store.gradient(parameter)
            for given, seeds in zip(inputs, gradients, strict=True):
                with torch.enable_grad():
                    written = self._run(given, leaves)
                names = [name for name in seeds if written[name].requires_grad]
                if not names:
                    continue
                torch.autograd.backward(
                    [written[name] for name in names], [seeds[name].value for name in names]
                )
                self._collect(leaves, touched)

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

    def _run(self, inputs: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> dict[str, Any]:
        values = dict(inputs)
        for layer in self._chain.layers[slice(*self.layers)]:
            own = {name: tensors[id(p)] for name, p in layer.parameters.items()}
            written = layer.run({**own, **layer.buffers}, [values[name] for name in layer.reads])
            values.update(zip(layer.writes, written, strict=True))
        return values
