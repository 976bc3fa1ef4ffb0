"""Low-rank adapters of experts, which transformers keeps as one parameter with three dimensions.

A layer's experts are `[E, O, I]`, or `[E, I, O]` where their module is transposed (GPT-OSS). Expert
`e` gets `W_e + scale * B_e A_e`. Names, shapes and arithmetic are those of peft's
`target_parameters`: `A` is `[E * r, I]`, expert after expert; `B` is `[O, r * E]`, the experts of
one rank side by side. The adapted experts of a layer exist while that layer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atomtrain.models.lora_config import LoraConfig
from atomtrain.models.lora_init import drawn
from atomtrain.models.quantised import empty_quantised, quantise, wide

_ADAPTERS = "expert_lora"
"""The name under which a module with experts has its adapters."""


class ExpertAdapter(nn.Module):
    """What adapts one parameter of a module with experts."""

    def __init__(self, base: Tensor, config: LoraConfig, *, transposed: bool) -> None:
        super().__init__()
        self.scale, self.transposed, self.bits = config.scale, transposed, config.bits
        self.shape, experts = base.shape, base.shape[0]
        if config.bits is not None:  # rows are those of all experts, [E * O, I]
            room = empty_quantised(base.shape[:2].numel(), base.shape[2], config.bits, base)
            self.codes, self.scales = (nn.Parameter(t, requires_grad=False) for t in room)
        inputs, outputs = base.shape[1:] if transposed else base.shape[:0:-1]
        made: dict[str, Any] = {"bias": False, "device": base.device, "dtype": base.dtype}
        self.lora_A = nn.Linear(inputs, config.r * experts, **made)
        self.lora_B = nn.Linear(config.r * experts, outputs, **made)

    def adapted(self, base: Tensor | None) -> Tensor:
        """Return the experts with their adapters in them, of the model's shape.

        Args:
            base: The frozen ones; `None` if they are held in few bits.
        """
        if base is None:
            base = wide(self.codes, self.scales, self.lora_A.weight.dtype).view(self.shape)
        experts = self.shape[0]
        a = self.lora_A.weight.unflatten(0, (experts, -1))  # [E, r, I]
        b = self.lora_B.weight.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [E, O, r]
        left, right = (a.mT, b.mT) if self.transposed else (b, a)
        return torch.baddbmm(base, left, right, alpha=self.scale)

    def beginning(self, read: Callable[[], Tensor], seed: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values before the first step; see `LoraLinear.beginning`."""
        if self.bits is not None:
            packed = [quantise(expert, self.bits) for expert in read()]
            yield "codes", torch.cat([each.codes for each in packed])
            yield "scales", torch.cat([each.scales for each in packed])
        yield "lora_A.weight", drawn(self.lora_A.weight.shape, seed)
        yield "lora_B.weight", torch.zeros(self.lora_B.weight.shape)


class _Adapted(nn.Module):
    """Goes before a class of experts: its forward sees adapted parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapters: Mapping[str, Any] = self._modules[_ADAPTERS]._modules  # type: ignore[union-attr]
        # An attribute of the instance hides the parameter of that name. Computed once a call: the
        # module may look at it once for each expert.
        for name, adapter in adapters.items():
            self.__dict__[name] = adapter.adapted(self._parameters.get(name))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in adapters:
                self.__dict__.pop(name, None)


@functools.cache
def _adapted_class(base: type[nn.Module]) -> type[nn.Module]:
    # One class for each of the model's, since modules of one class are traced once for all.
    return type(f"Adapted{base.__name__}", (_Adapted, base), {})


def adapt(module: nn.Module, name: str, config: LoraConfig) -> None:
    """Put an adapter beside the frozen parameter `name` of a module, in place.

    With `bits` the parameter goes, and the adapter has its codes and scales.

    Raises:
        ConfigError: its rows cannot be quantised.
    """
    if not isinstance(module, _Adapted):
        module.__class__ = _adapted_class(type(module))  # type: ignore[arg-type]
        module.add_module(_ADAPTERS, nn.ModuleDict())
    adapter = ExpertAdapter(module.get_parameter(name), config, transposed=is_transposed(module))
    module.get_submodule(_ADAPTERS).add_module(name, adapter)
    if config.bits is not None:
        delattr(module, name)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's experts are `[E, I, O]`, as peft tells it."""
    return bool(getattr(module, "is_transposed", False))


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of parameters that can be adapted, by the parameter's name.

    Those have three dimensions and are no module of PyTorch's own, such as a convolution's.
    """
    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False)
        if path and parameter.ndim == 3 and parameter.is_floating_point()
    }


def merged_experts(
    weight: Tensor, adapter: Mapping[str, Tensor], scale: float, *, transposed: bool
) -> Tensor:
    """Return what frozen experts become with their adapter in them, in float32, as peft merges.

    Args:
        weight: `[E, O, I]`, or `[E, I, O]` if transposed.
        adapter: `lora_A.weight` and `lora_B.weight`.
        scale: See `LoraConfig.scale`.
        transposed: See `is_transposed`.
    """
    a = adapter["lora_A.weight"].float().unflatten(0, (len(weight), -1))
    b = adapter["lora_B.weight"].float().unflatten(1, (-1, len(weight)))
    product = torch.einsum(f"ore,eri->{'eio' if transposed else 'eoi'}", b, a)
    return weight.float() + product * scale


def adapter_of(parameter: str) -> str:
    """Return the name of the adapter of a parameter, whether or not it has one."""
    path, _, name = parameter.rpartition(".")
    return f"{path}.{_ADAPTERS}.{name}"


def adapted_by(adapter: str) -> str | None:
    """Return the name of the parameter that an adapter is of, `None` if it is a linear layer's."""
    path, _, name = adapter.rpartition(".")
    path, _, middle = path.rpartition(".")
    return f"{path}.{name}" if middle == _ADAPTERS else None
