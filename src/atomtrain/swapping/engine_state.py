"""The model's state in the host's memory, under the model's own names or by ranges of bytes.

Whatever is read here is what the last step left; whatever is written is what the next one uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from atomtrain.planning.several import further_gradients_bytes
from atomtrain.swapping.engine_base import EngineBase
from atomtrain.swapping.fragments import Fragment, element_bytes, fragment_ranges


class EngineState(EngineBase):
    """An engine's parameters, buffers and optimizer state; between two steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers under the model's own names.

        They share the host's memory, but for bfloat16 parameters with masters: of those it has the
        masters, as float32, which share memory or not as the optimizer keeps them. Read only.
        """
        self.synchronize()
        return self._state.parameters_and_buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace parameters (masters included) and buffers; names and shapes must match."""
        self.synchronize()
        self._state.set_parameters_and_buffers(state)
        self._wrote_blocks(range(self._store.layout.blocks))
        self.refresh_buffers()

    def refresh_buffers(self) -> None:
        """Bring the model's buffers to the device again, after they were changed on the host."""
        if self._executor is not None:
            self._executor.refresh_buffers()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state by parameter name, such as `exp_avg`; shares memory.

        Masters are no part of it: `state_dict` has them.
        """
        self.synchronize()
        return self._state.moments()

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer state by parameter name."""
        self.synchronize()
        self._state.set_moments(state)

    @property
    def parameters(self) -> int:
        """Number of parameters, shared weights counted once."""
        return sum(parameter.numel() for parameter in self.planner.chain.parameters)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state, wherever they lie.

        The state of an optimizer that does not tell is taken for two moments of the parameters'
        type.
        """
        taken = self.planner.updates
        assert taken is not None
        layout = self._store.layout
        gradients = self._store.places.total_bytes
        gradients += further_gradients_bytes(layout, len(self.devices))
        return layout.total_bytes + gradients + taken.host_bytes - taken.scratch_bytes

    def layers(self) -> dict[str, list[str]]:
        """Return the names of the parameters by layer; a shared weight is with its first layer."""
        names = self.planner.chain.names
        seen: set[int] = set()
        layers: dict[str, list[str]] = {}
        for layer in self.planner.chain.layers:
            fresh = {id(p): names[id(p)] for p in layer.parameters.values() if id(p) not in seen}
            seen.update(fresh)
            layers[layer.name] = list(fresh.values())
        return layers

    def fragment_ranges(self) -> list[tuple[int, int]]:
        """Divide what is trained into fragments of whole layers, a few MB to 64 MB each.

        The result depends only on the model, so all peers of a run divide alike.

        Returns:
            Byte ranges of the host's gradients, in order and without gaps. Where nothing is frozen
            those of the parameters are the same.
        """
        return fragment_ranges(self._store.layout.gradients)

    @contextmanager
    def fragment(self, start_bytes: int, stop_bytes: int) -> Iterator[Tensor]:
        """Give exclusive access to the trainable parameters of a range, between two steps.

        Yields:
            1-D float32; what is written there is what the next step uses. A view of the host store,
            or, for a model of bfloat16 or with frozen parameters, a copy that is written back at
            the end.

        Raises:
            ConfigError: the trainable parameters are not all float32, nor all bfloat16.
        """
        self._check_whole()
        with self._guarded():
            blocks = self._updates.wait_for_range(start_bytes, stop_bytes)
            self._bring_to_host(blocks, moments=False)
        store, chain = self._store, self.planner.chain
        fragment = Fragment(chain, store.layout, store.parameters, start_bytes, stop_bytes)
        with fragment.view(self.masters) as values:
            yield values
        self._wrote_blocks(blocks)

    def fragment_places(self, start_bytes: int, stop_bytes: int) -> list[tuple[nn.Parameter, int]]:
        """Return the parameters of a range of the host's parameters, each with its first element.

        Raises:
            ConfigError: the model's parameters are not all float32, nor all bfloat16.
        """
        store = self._store
        return Fragment(
            self.planner.chain, store.layout, store.parameters, start_bytes, stop_bytes
        ).places

    @property
    def element_bytes(self) -> int:
        """Bytes of a trainable parameter in the host store: 4 of float32, 2 of bfloat16.

        Raises:
            ConfigError: the trainable parameters are not all of one of the two.
        """
        return element_bytes(self.planner.chain)
