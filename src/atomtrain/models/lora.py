"""Low-rank adapters beside frozen linear layers and experts, as `peft` names and computes them.

LoRA (Hu et al. 2021): `y = W x + b + alpha/r * B A x` with `A [r, I]` and `B [O, r]` trained, and
dropout on the adapter's `x` if wanted; rsLoRA divides by the root of `r`. DoRA (Liu et al. 2024)
also trains the length `m [O]` of the adapted matrix's rows: `y = m / |W + alpha/r B A| * (W x +
alpha/r B A x) + b`, where the rows' norms get no gradient.

transformers keeps a layer's experts as one parameter, `[E, O, I]`, or `[E, I, O]` where their
module is transposed (GPT-OSS). Expert `e` gets `W_e + scale * B_e A_e`. Names, shapes and
arithmetic are those of peft's `target_parameters`: `A` is `[E * r, I]`, expert after expert; `B` is
`[O, r * E]`, the experts of one rank side by side. The adapted experts of a layer exist while that
layer runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.errors import ConfigError, nearest
from atomtrain.models.heads import head_of
from atomtrain.models.image_text import freeze_tower
from atomtrain.models.image_text import in_tower as is_in_tower
from atomtrain.models.lora_config import ALL_LINEAR, BITS, NOTHING, LoraConfig
from atomtrain.models.lora_init import Begun, begin, drawn
from atomtrain.models.lora_saved import is_within, saved_modules
from atomtrain.models.quantised import dequantise, empty_quantised, quantise, quantised_linear, wide

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
    path, _, name = parameter.rpartition(".")
    return f"{path}.{_ADAPTERS}.{name}"


def adapted_by(adapter: str) -> str | None:
    """Return the name of the parameter that an adapter is of, `None` if it is a linear layer's."""
    path, _, name = adapter.rpartition(".")
    path, _, middle = path.rpartition(".")
    return f"{path}.{name}" if middle == _ADAPTERS else None


ADAPTER_PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter: `[..., I]` to `[..., O]`."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.scale, self.bits, self._config = config.scale, config.bits, config
        inputs, outputs, like = base.in_features, base.out_features, base.weight
        if config.bits is None:
            self.weight: nn.Parameter | None = _frozen(base.weight)
        else:
            self.weight = None
            room = empty_quantised(outputs, inputs, config.bits, like)
            self.codes, self.scales = map(_frozen, room)
        self.bias = None if base.bias is None else _frozen(base.bias)
        if config.init != NOTHING and config.r > min(inputs, outputs):
            raise ConfigError(
                f"--lora init={config.init} begins with {config.r} parts of every matrix, and one "
                f"is {outputs} x {inputs}; give r={min(inputs, outputs)} or less, or targets "
                "without it"
            )
        made: dict[str, Any] = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.lora_A = nn.Linear(inputs, config.r, **made)
        self.lora_B = nn.Linear(config.r, outputs, **made)
        self.lora_dropout = nn.Dropout(config.dropout) if config.dropout else None
        self.lora_magnitude_vector: nn.Parameter | None = None
        if config.dora:
            self.lora_magnitude_vector = nn.Parameter(like.new_empty(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.weight is not None:
            product = F.linear(inputs, self.weight)
        else:
            product = quantised_linear(inputs, self.codes, self.scales)
        adapted = inputs if self.lora_dropout is None else self.lora_dropout(inputs)
        out: Tensor = product + self.lora_B(self.lora_A(adapted)) * self.scale
        if self.lora_magnitude_vector is not None:
            out = out * (self.lora_magnitude_vector / self._norms())
        return out if self.bias is None else out + self.bias

    def base(self) -> Tensor:
        """Return the frozen matrix `[O, I]`, in the adapter's type."""
        if self.weight is not None:
            return self.weight
        return dequantise(self.codes, self.scales, self.lora_A.weight.dtype)

    def beginning(self, read: Callable[[], Tensor], seed: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of everything before the first step.

        Args:
            read: Returns the trained matrix, `[O, I]` float32.
            seed: What decides what is drawn. At first the layer computes what it did.
        """
        weight = read()
        begun = self._begun(weight, seed)
        if self._takes_out:
            weight = begun.within(weight, -self.scale)
        if self.weight is not None:
            yield "weight", weight
        else:
            packed = quantise(weight, self.bits or BITS[0])
            yield "codes", packed.codes
            yield "scales", packed.scales
            weight = dequantise(*packed, torch.float32)
        yield "lora_A.weight", begun.a
        yield "lora_B.weight", begun.b
        if self.lora_magnitude_vector is not None:
            whole = begun.within(weight, self.scale) if self._takes_out else weight
            yield "lora_magnitude_vector", whole.norm(dim=1)

    @property
    def _takes_out(self) -> bool:
        return self._config.init != NOTHING

    def _begun(self, weight: Tensor, seed: str) -> Begun:
        if self._takes_out:
            return begin(weight, self._config, seed)
        return Begun(drawn(self.lora_A.weight.shape, seed), torch.zeros(self.lora_B.weight.shape))

    def _norms(self) -> Tensor:
        with torch.no_grad():
            product = self.lora_B.weight @ self.lora_A.weight
            norms: Tensor = (self.base() + product * self.scale).norm(dim=1)
        return norms


def add_adapters(model: nn.Module, config: LoraConfig, *, in_tower: bool = False) -> nn.Module:
    """Freeze a model and put adapters beside its linear layers and experts, in place; return it.

    A classifier's head has no adapter: it is trained itself, as are `modules_to_save`. What looks
    at images has some only with `in_tower`.

    Raises:
        ConfigError: a target names neither, or experts get what their adapters do not have; or no
            module has the name of one that is trained itself.
    """
    model.requires_grad_(False)
    saved = saved_modules(model, config, in_tower=in_tower)
    for name, module in _targets(model, config, saved, in_tower):
        parent, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, LoraLinear(module, config))
        else:
            adapt(module, last, config)
    if (head := head_of(model)) is not None:
        head.requires_grad_(True)
    for module in saved.values():
        module.requires_grad_(True)
    if saved and not in_tower:  # which may be a part of one
        freeze_tower(model)
    return model


def merged(weight: Tensor, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return what a frozen matrix becomes with its adapter in it, computed in float32.

    Args:
        weight: `[O, I]`.
        adapter: Its tensors by the names of `ADAPTER_PARTS`.
        scale: See `LoraConfig.scale`.
    """
    product = adapter["lora_B.weight"].float() @ adapter["lora_A.weight"].float()
    adapted = weight.float() + product * scale
    if "lora_magnitude_vector" in adapter:
        adapted *= (adapter["lora_magnitude_vector"].float() / adapted.norm(dim=1))[:, None]
    return adapted


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear | ExpertAdapter]:
    kinds = (LoraLinear, ExpertAdapter)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def _targets(
    model: nn.Module, config: LoraConfig, saved: Mapping[str, nn.Module], in_tower: bool
) -> list[tuple[str, nn.Module]]:
    heads = (getattr(model, "get_output_embeddings", lambda: None)(), head_of(model))
    linears: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(module is head for head in heads)
        and (in_tower or not is_in_tower(model, name))
    }
    experts = experts_of(model)
    linear_names = {name.rpartition(".")[2] for name in linears}
    expert_names = {each for name in experts for each in _names_of(name)}
    known = linear_names | expert_names
    wanted = set(config.targets) - {ALL_LINEAR}
    if unknown := sorted(wanted - known):
        raise ConfigError(
            f"--lora targets={unknown[0]} is neither a linear layer nor experts of the model."
            f"{nearest(unknown[0], sorted(known))} It has {', '.join(sorted(known)) or 'none'}"
        )
    more = config.dora or config.dropout or config.init != NOTHING
    if more and (named := sorted(wanted & expert_names)):
        raise ConfigError(
            f"--lora targets={named[0]} names experts, whose adapters have neither dora nor "
            "dropout, and begin at nothing; leave dora, dropout and init out, or the experts"
        )
    if ALL_LINEAR in config.targets:
        wanted |= linear_names
    if not wanted:
        raise ConfigError(
            "the model has no nn.Linear to put an adapter beside; train it without --lora"
        )
    found = [(name, m) for name, m in linears.items() if name.rpartition(".")[2] in wanted]
    found += [(name, m) for name, m in experts.items() if wanted & _names_of(name)]
    beside = [(name, m) for name, m in found if name not in saved and not is_within(name, saved)]
    if not beside:
        raise ConfigError(
            f"--lora modules_to_save={'+'.join(config.modules_to_save)} has all of targets="
            f"{'+'.join(config.targets)} in it, so there is no adapter; leave it out, or train "
            "without --lora"
        )
    return beside


def _names_of(parameter: str) -> set[str]:
    names = set(parameter.split(".")[-2:])
    return names - {"weight"}


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
