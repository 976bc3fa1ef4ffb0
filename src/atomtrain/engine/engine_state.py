"""The model's state in the host's memory, under the model's own names or by ranges of bytes.

Whatever is read here is what the last step left; whatever is written is what the next one uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from atomtrain.engine.engine_base import EngineCore
from atomtrain.engine.state.fragments import Fragment, element_bytes, fragment_ranges
from atomtrain.engine.state.model_state import ModelState
from atomtrain.planning.plan.memory_map import Region, memory_map
from atomtrain.planning.plan.multi_device import further_gradients_bytes


class EngineState:
    """An engine's parameters, buffers and optimizer state; between two steps."""

    def __init__(self, core: EngineCore) -> None:
        """Of the engine that has this core."""
        self._core = core
        self._named = ModelState(core.model, core.masters)

    def state_dict(self) -> dict[str, Any]:
        """See `Engine.state_dict`."""
        self._core.synchronize()
        return self._named.parameters_and_buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Engine.load_state_dict`."""
        self._core.synchronize()
        self._named.set_parameters_and_buffers(state)
        self._core.wrote_blocks(range(self._core.store.layout.blocks))
        self.refresh_buffers()

    def refresh_buffers(self) -> None:
        """See `Engine.refresh_buffers`."""
        if self._core.executor is not None:
            self._core.executor.refresh_buffers()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """See `Engine.optimizer_state`."""
        self._core.synchronize()
        return self._named.moments()

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Engine.load_optimizer_state`."""
        self._core.synchronize()
        self._named.set_moments(state)

    @property
    def parameters(self) -> int:
        """See `Engine.parameters`."""
        return sum(parameter.numel() for parameter in self._core.planner.chain.parameters)

    @property
    def state_bytes(self) -> int:
        """See `Engine.state_bytes`."""
        taken = self._core.planner.updates
        assert taken is not None
        layout = self._core.store.layout
        gradients = self._core.store.places.total_bytes
        gradients += further_gradients_bytes(layout, len(self._core.devices))
        return layout.total_bytes + gradients + taken.host_bytes - taken.scratch_bytes

    def memory_map(self) -> list[Region]:
        """See `Engine.memory_map`."""
        planner = self._core.planner
        layout, devices = self._core.store.layout, len(self._core.devices)
        state_bytes = self.state_bytes - layout.total_bytes - self._core.store.places.total_bytes
        state_bytes -= further_gradients_bytes(layout, devices)
        if self._core.updates.disk is not None:
            state_bytes -= self._core.updates.disk.use.saved_state_bytes
        return memory_map(planner.chain, self._core.plan, state_bytes, devices)

    def layers(self) -> dict[str, list[str]]:
        """See `Engine.layers`."""
        names = self._core.planner.chain.names
        seen: set[int] = set()
        layers: dict[str, list[str]] = {}
        for layer in self._core.planner.chain.layers:
            fresh = {id(p): names[id(p)] for p in layer.parameters.values() if id(p) not in seen}
            seen.update(fresh)
            layers[layer.name] = list(fresh.values())
        return layers

    def fragment_ranges(self) -> list[tuple[int, int]]:
        """See `Engine.fragment_ranges`."""
        return fragment_ranges(self._core.store.layout.gradients)

    @contextmanager
    def fragment(self, start_bytes: int, stop_bytes: int) -> Iterator[Tensor]:
        """See `Engine.fragment`."""
        self._core.check_whole()
        with self._core.guarded():
            blocks = self._core.updates.wait_for_range(start_bytes, stop_bytes)
            self._core.bring_to_host(blocks, moments=False)
        store, chain = self._core.store, self._core.planner.chain
        fragment = Fragment(chain, store.layout, store.parameters, start_bytes, stop_bytes)
        with fragment.view(self._core.masters) as values:
            yield values
        self._core.wrote_blocks(blocks)

    def fragment_places(self, start_bytes: int, stop_bytes: int) -> list[tuple[nn.Parameter, int]]:
        """See `Engine.fragment_places`."""
        store = self._core.store
        return Fragment(
            self._core.planner.chain, store.layout, store.parameters, start_bytes, stop_bytes
        ).places

    @property
    def element_bytes(self) -> int:
        """See `Engine.element_bytes`."""
        return element_bytes(self._core.planner.chain)
