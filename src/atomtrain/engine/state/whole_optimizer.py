"""The optimizer of all parameters that the caller made: what it holds, and what it saves.

The state of each block lies in a worker of its own. What lies in the whole optimizer, because it
was there when the model was swapped or was loaded since, goes to the blocks; what is saved of it
has the blocks' state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.engine.state.precision import Masters
from atomtrain.errors import ConfigError

_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "exp_inf", "max_exp_avg_sq", "momentum_buffer", "square_avg",
    "grad_avg", "sum", "acc_delta", "prev",
)  # fmt: skip
"""Keys of torch's and ATOM's optimizers whose tensors have the parameter's shape."""


def check_shapes(name: str, parameter: Tensor, values: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if a parameter's state is that of another one."""
    for key in _ELEMENTWISE:
        value = values.get(key)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise ConfigError(
                f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, the parameter "
                f"has {list(parameter.shape)}; load the state of this very model"
            )


def check_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks on an optimizer's step, which would be called for each block.

    Raises:
        ConfigError: there are some.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(
            f"{type(optimizer).__name__} has hooks on its step, which swapped training takes once "
            "for each block of parameters; remove them, and do after engine.step and "
            "engine.synchronize what they do"
        )


class WholeOptimizer:
    """Has `state_dict` and `load_state_dict` mean what they do without an engine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters,
        names: Mapping[int, str],
        synchronize: Callable[[], None],
    ) -> None:
        """Hook into `optimizer`.

        Args:
            optimizer: That of all parameters.
            masters: Knows the blocks' state.
            names: Of parameters, by `id`.
            synchronize: Blocks until all updates are applied.
        """
        self._optimizer, self._masters, self._synchronize = optimizer, masters, synchronize
        self._names = names
        self._members = self._numbers()
        self._replaced = False
        there = weakref.ref(self)  # no cycle: the engine owns the optimizer

        def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            whole = there()
            if whole is None:
                raise ConfigError(
                    "the optimizer's state has gone with its engine; save it before the engine is "
                    "forgotten"
                )
            found = whole._saved()
            for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
                saved.update({key: value for key, value in group.items() if key != "params"})
            return {**state, "state": found}

        def loaded(_: torch.optim.Optimizer) -> None:
            if (whole := there()) is not None:
                whole._replaced = True

        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_post_hook(loaded)

    def check(self) -> None:
        """Refuse other parameters than those that workers have, and hooks on the step.

        Raises:
            ConfigError: there are some, or fewer; or hooks on its step.
        """
        check_step_hooks(self._optimizer)
        if self._numbers() != self._members:
            raise ConfigError(
                "the optimizer's groups have other parameters than when the model was swapped; "
                "give all of them there, or close the engine and swap the model again"
            )

    @property
    def holds(self) -> bool:
        """Whether there is something that blocks are to have."""
        return self._replaced or bool(self._optimizer.state)

    def hand_over(self) -> None:
        """Give the blocks what is here; call when all updates are applied.

        Raises:
            ConfigError: a state does not fit its parameter; then no block has changed.
        """
        if not self.holds:
            return
        given, replaced = dict(self._optimizer.state), self._replaced
        self._optimizer.state.clear()
        self._replaced = False
        for parameter in self._parameters():
            name = self._names.get(id(parameter), "a parameter")
            check_shapes(name, parameter, given.get(parameter, {}))
        for parameter in self._parameters():
            if parameter in given or replaced:
                self._masters.set_state(parameter, given.get(parameter, {}))

    def _saved(self) -> dict[int, dict[str, Any]]:
        """Return each parameter's state by its number, as `torch.optim` counts them."""
        self._synchronize()
        found = {}
        for number, parameter in enumerate(self._parameters()):
            if state := self._masters.state(parameter):
                found[number] = state
        return found

    def _numbers(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]

    def _parameters(self) -> list[nn.Parameter]:
        groups = self._optimizer.param_groups
        return list(dict.fromkeys(p for group in groups for p in group["params"]))
