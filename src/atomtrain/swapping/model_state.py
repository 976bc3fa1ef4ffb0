"""A model's parameters, buffers and optimizer state under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.swapping.precision import Masters


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
            ConfigError: the model has no such parameter.
        """
        parameters = dict(self._model.named_parameters())
        for name, values in state.items():
            if name not in parameters:
                raise ConfigError(f"optimizer state names {name!r}, which the model does not have")
            self._masters.set_moments(parameters[name], values)
