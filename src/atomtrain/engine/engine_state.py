"""The model's state in the host's memory, under the model's own names or by ranges of bytes.

Whatever is read here is what the last step left; whatever is written is what the next one uses.
The ranges are fragments: runs of whole layers of the host's parameters, as the swarm averages them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.engine_base import EngineCore
from atomtrain.engine.state.precision import Masters
from atomtrain.engine.state.whole_optimizer import check_shapes
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.plan import Region, memory_map
from atomtrain.planning.plan.updating import further_gradients_bytes

_LARGEST_BYTES = 64 << 20
_LEAST_FRAGMENTS = 4
_FLOAT32_BYTES = 4


class ModelState:
    """Reads and writes what lies on the host; all updates must have been applied before."""

    def __init__(self, model: nn.Module, masters: Masters) -> None:
        self._model, self._masters = model, masters

    def parameters_and_buffers(self) -> dict[str, Any]:
        """Return the model's state, with masters in place of the parameters that have them."""
        state = self._model.state_dict()
        read: dict[int, Tensor] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if name in state and self._masters.has(parameter):
                if id(parameter) not in read:
                    read[id(parameter)] = self._masters.read(parameter)
                state[name] = read[id(parameter)]
        return state

    def set_parameters_and_buffers(self, state: Mapping[str, Any]) -> None:
        """Replace the model's state, masters included."""
        self._model.load_state_dict(state)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if self._masters.has(parameter):
                self._masters.write(parameter, state.get(name, parameter.detach()))

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state without masters, by parameter name; shares memory."""
        return {
            name: self._masters.moments(parameter)
            for name, parameter in self._model.named_parameters()
        }

    def set_moments(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state but for masters, by parameter name.

        Raises:
            ConfigError: the model has no such parameter, or it has another shape; then nothing is
                replaced.
        """
        parameters = dict(self._model.named_parameters())
        for name, values in state.items():
            if name not in parameters:
                raise ConfigError(f"optimizer state names {name!r}, which the model does not have")
            check_shapes(name, parameters[name], values)
        for name, values in state.items():
            self._masters.set_moments(parameters[name], values)


def fragment_ranges(layout: Layout, each_bytes: int) -> list[tuple[int, int]]:
    """Divide an arena into byte ranges of whole layers, in order and without gaps.

    Parameters of `each_bytes` are divided as float32 are.
    """
    largest_bytes = _LARGEST_BYTES * each_bytes // _FLOAT32_BYTES
    most_bytes = min(largest_bytes, -(-layout.total_bytes // _LEAST_FRAGMENTS))
    ends = [stop for _, stop in layout.layers] + [s.stop_bytes for s in layout.shared]
    ranges: list[tuple[int, int]] = []
    start = last = 0
    for end in ends:
        if end - start > most_bytes and last > start:
            ranges.append((start, last))
            start = last
        last = end
    return [*ranges, (start, last)] if last > start else ranges


def element_bytes(chain: Chain) -> int:
    """Return the bytes of a trainable parameter in the arena: 4 of float32, 2 of 16-bit types.

    Raises:
        ConfigError: the parameters are not all of one of them.
    """
    types = {parameter.dtype for parameter in chain.parameters if parameter.requires_grad}
    if types == {torch.float32}:
        return _FLOAT32_BYTES
    if types in ({torch.bfloat16}, {torch.float16}):
        return _FLOAT32_BYTES // 2
    raise ConfigError(
        f"the model mixes {', '.join(sorted(map(str, types)))}; fragments are of models whose "
        "trainable parameters are all of one type of 32 or 16 bits: convert it with model.float()"
    )


class Fragment:
    """Access to the trainable parameters of a range, as float32."""

    def __init__(
        self, chain: Chain, layout: Layout, arena: Tensor, start_bytes: int, stop_bytes: int
    ) -> None:
        self._each_bytes = element_bytes(chain)
        # Where nothing is frozen, gradients and parameters lie alike.
        places = layout.gradients
        as_is = places is layout and self._each_bytes == _FLOAT32_BYTES
        self._view = arena[start_bytes:stop_bytes].view(torch.float32) if as_is else None
        self._elements = (stop_bytes - start_bytes) // self._each_bytes
        self._places: list[tuple[nn.Parameter, int]] = [
            (parameter, (places.offsets[id(parameter)] - start_bytes) // self._each_bytes)
            for parameter in chain.parameters
            if start_bytes <= places.offsets.get(id(parameter), -1) < stop_bytes
            and parameter.numel()
        ]

    @property
    def places(self) -> list[tuple[nn.Parameter, int]]:
        """Every parameter with its first element in the range."""
        return list(self._places)

    @contextmanager
    def view(self, masters: Masters) -> Iterator[Tensor]:
        """Give the parameters in one buffer: the arena itself, or masters that go back at the end.

        Going back is exact: what nobody changed keeps its bits. After an error nothing goes back.

        Yields:
            1-D float32.
        """
        if self._view is not None:
            yield self._view
            return
        buffer = torch.zeros(self._elements, dtype=torch.float32)
        for parameter, index in self._places:
            self._part(buffer, parameter, index).copy_(masters.read(parameter))
        yield buffer
        for parameter, index in self._places:
            masters.write(parameter, self._part(buffer, parameter, index))

    def _part(self, buffer: Tensor, parameter: nn.Parameter, index: int) -> Tensor:
        return buffer[index : index + parameter.numel()].view(parameter.shape)


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
        return fragment_ranges(self._core.store.layout.gradients, self.element_bytes)

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
