"""A model's parameters, buffers and optimizer state under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from atomtrain.engine.state.precision import Masters
from atomtrain.errors import ConfigError


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
            _check_shapes(name, parameters[name], values)
        for name, values in state.items():
            self._masters.set_moments(parameters[name], values)


_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg",
    "grad_avg", "sum", "acc_delta", "prev",
)  # fmt: skip
"""Keys of torch's and ATOM's optimizers whose tensors have the parameter's shape."""


def _check_shapes(name: str, parameter: Tensor, values: Mapping[str, Any]) -> None:
    for key in _ELEMENTWISE:
        value = values.get(key)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise ConfigError(
                f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, the parameter "
                f"has {list(parameter.shape)}; load the state of this very model"
            )
