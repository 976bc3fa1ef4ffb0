"""What a caller must leave as it is of the model's parameters while an engine trains them.

Their memory is the host store's, gradients have places for those that are trained, and autograd
meets copies of them on the device, which have no hooks of the caller's. Whatever else would happen
in silence is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import ConfigError


class _Kept(NamedTuple):
    parameter: nn.Parameter
    trained: bool
    address: int


class KeptParameters:
    """The parameters of a chain, as an engine took them over."""

    def __init__(self, chain: Chain, model: nn.Module, *, move: bool) -> None:
        """Take down where they lie, and which are trained; call when the store has them.

        Where they lie on a disk updates `move` them, beside a step, so nobody can tell who did.
        """
        self._parts = list(_parts_of(model))
        self._names, self._move = chain.names, move
        self._kept = [_Kept(p, p.requires_grad, p.data_ptr()) for p in chain.parameters]

    def check(self) -> None:
        """Refuse what was changed since.

        Raises:
            ConfigError: a parameter is frozen, or is not any more; lies elsewhere; or has a hook.
                Or a parameter, module or saved buffer was replaced.
        """
        for kind, place, holder, name, was in self._parts:
            if holder.get(name) is not was:
                raise ConfigError(
                    f"{kind} {place!r} was replaced after the model was swapped, which has no "
                    "effect; put it back (write to tensors in place with copy_), or close the "
                    "engine and swap the model again"
                )
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


def _parts_of(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Any], str, Any]]:
    """Yield kind, path, and place of what a model consists of."""
    for path, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        for kind, holder in (
            ("parameter", module._parameters),
            ("module", module._modules),
            ("buffer", module._buffers),
        ):
            for name, was in holder.items():
                # Some models put tables of their own there whenever they run.
                if was is not None and not (kind == "buffer" and name in unsaved):
                    yield kind, f"{path}.{name}" if path else name, holder, name, was


def check_memory(model: nn.Module) -> None:
    """Refuse trained parameters whose memory other tensors of the model share.

    Each gets a place of its own when the model is swapped, so that an update of one would not reach
    the others any more.

    Raises:
        ConfigError: names two.
    """
    named: list[tuple[int, int, bool, str]] = []
    tensors = {id(tensor): (name, tensor) for name, tensor in model.named_buffers()}
    tensors.update((id(tensor), (name, tensor)) for name, tensor in model.named_parameters())
    for name, tensor in tensors.values():
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            continue
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.data_ptr()
        named.append((begin, begin + extent * tensor.element_size(), tensor.requires_grad, name))
    named.sort()
    ends = {True: (0, ""), False: (0, "")}
    for begin, end, trained, name in named:
        for other in (True, False) if trained else (True,):
            until, before = ends[other]
            if begin < until:
                raise ConfigError(
                    f"{before!r} and {name!r} are two tensors in one memory, and what is trained "
                    "gets a place of its own; make them one parameter "
                    f"(module.weight = other.weight), or give one a copy with clone()"
                )
        ends[trained] = max(ends[trained], (end, name))


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
