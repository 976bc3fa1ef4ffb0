"""What a caller must leave as it is of the model's parameters while an engine trains them.

Their memory is the host store's, gradients have places for those that are trained, and autograd
meets copies of them on the device, which have no hooks of the caller's. Whatever else would happen
in silence is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import ConfigError


class _Kept(NamedTuple):
    parameter: nn.Parameter
    trained: bool
    address: int


class KeptParameters:
    """The parameters of a chain, as an engine took them over."""

    def __init__(self, chain: Chain, *, move: bool) -> None:
        """Take down where they lie, and which are trained; call when the store has them.

        Where they lie on a disk updates `move` them, beside a step, so nobody can tell who did.
        """
        self._names, self._move = chain.names, move
        self._kept = [_Kept(p, p.requires_grad, p.data_ptr()) for p in chain.parameters]

    def check(self) -> None:
        """Refuse what was changed since.

        Raises:
            ConfigError: a parameter is frozen, or is not any more; lies elsewhere; or has a hook.
        """
        for parameter, trained, address in self._kept:
            if parameter.requires_grad != trained:
                raise ConfigError(
                    f"parameter {self._name(parameter)!r} was swapped with requires_grad={trained} "
                    f"and has requires_grad={not trained} now; set it back, or close the engine "
                    "and swap the model again"
                )
            if not self._move and parameter.data_ptr() != address:
                raise ConfigError(
                    f"parameter {self._name(parameter)!r} has left the engine's memory (by .data = "
                    "..., or model.to); write to it in place with copy_, or use "
                    "engine.load_state_dict"
                )
        check_hooks((p for p, _, _ in self._kept), self._names)

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]


def check_hooks(parameters: Iterable[nn.Parameter], names: Mapping[int, str]) -> None:
    """Refuse hooks that swapped training would never call.

    Raises:
        ConfigError: a trained parameter has one.
    """
    for parameter in parameters:
        if parameter.requires_grad and (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ):
            raise ConfigError(
                f"parameter {names[id(parameter)]!r} has a hook on its gradient, which swapped "
                "training does not call; remove it, and change gradients with "
                "engine.combine_gradients, or in the model by what forward does"
            )
