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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomtrain.errors import ConfigError, nearest
from atomtrain.models.forms import form_of
from atomtrain.models.heads import head_of
from atomtrain.models.image_text import freeze_tower
from atomtrain.models.image_text import in_tower as is_in_tower
from atomtrain.models.lora_config import ALL_LINEAR, NOTHING, LoraConfig
from atomtrain.models.lora_embedding import (
    EMBEDDING_PARTS,
    LoraEmbedding,
    adapt_embedding,
    check_embedding,
    embeddings_of,
)
from atomtrain.models.lora_init import Begun, begin, drawn
from atomtrain.models.lora_saved import is_within, saved_modules
from atomtrain.models.narrow import (
    MadeWide,
    Narrowing,
    NarrowLinear,
    NarrowParameter,
    experts_of,
    frozen,
    is_transposed,
    narrowed,
    narrowing,
    put_beside,
)
from atomtrain.models.quantised import dequantise, in_places


class ExpertAdapter(nn.Module):
    """What adapts one parameter of a module with experts."""

    def __init__(self, base: Tensor, config: LoraConfig, *, transposed: bool) -> None:
        super().__init__()
        self.scale, self.transposed, self.experts = config.scale, transposed, base.shape[0]
        few = config.bits is not None
        self.narrow = narrowed(base, config, transposed=transposed) if few else None
        inputs, outputs = base.shape[1:] if transposed else base.shape[:0:-1]
        made: dict[str, Any] = {"bias": False, "device": base.device, "dtype": base.dtype}
        self.lora_A = nn.Linear(inputs, config.r * self.experts, **made)
        self.lora_B = nn.Linear(config.r * self.experts, outputs, **made)

    def current(self, base: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the experts with their adapters in them, of the model's shape.

        Args:
            base: The frozen ones; `None` if they are held in few bits.
            dtype: Of what they multiply; that of the adapters counts.
        """
        if base is None:
            assert self.narrow is not None
            base = self.narrow.current(None, self.lora_A.weight.dtype)
        a = self.lora_A.weight.unflatten(0, (self.experts, -1))  # [E, r, I]
        b = self.lora_B.weight.unflatten(1, (-1, self.experts)).permute(2, 0, 1)  # [E, O, r]
        left, right = (a.mT, b.mT) if self.transposed else (b, a)
        return torch.baddbmm(base, left, right, alpha=self.scale)

    def beginning(self, read: Callable[[], Tensor], seed: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values before the first step; see `LoraLinear.beginning`."""
        if self.narrow is not None:
            for part, values in self.narrow.beginning(read, seed):
                yield f"narrow.{part}", values
        yield "lora_A.weight", drawn(self.lora_A.weight.shape, seed)
        yield "lora_B.weight", torch.zeros(self.lora_B.weight.shape)


def adapt(module: nn.Module, name: str, config: LoraConfig) -> None:
    """Put an adapter beside the frozen parameter `name` of a module, in place.

    With `bits` the parameter goes, and the adapter has its codes and scales.
    """
    adapter = ExpertAdapter(module.get_parameter(name), config, transposed=is_transposed(module))
    put_beside(module, name, adapter, instead=config.bits is not None)


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


ADAPTER_PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", *EMBEDDING_PARTS)


class LoraLinear(MadeWide):
    """A frozen linear layer with an adapter: `[..., I]` to `[..., O]`."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.scale, self.bits, self._config = config.scale, config.bits, config
        inputs, outputs, like = base.in_features, base.out_features, base.weight
        if config.bits is None:
            self.weight = frozen(base.weight)
        else:
            self.hold(form_of(config, inputs), outputs, like, inputs)
        self.bias = None if base.bias is None else frozen(base.bias)
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
        product = F.linear(inputs, self.weight) if self.bits is None else self.product(inputs)
        adapted = inputs if self.lora_dropout is None else self.lora_dropout(inputs)
        out: Tensor = product + self.lora_B(self.lora_A(adapted)) * self.scale
        if self.lora_magnitude_vector is not None:
            out = out * (self.lora_magnitude_vector / self._norms())
        return out if self.bias is None else out + self.bias

    def base(self) -> Tensor:
        """Return the frozen matrix `[O, I]`, in the adapter's type."""
        if self.bits is None:
            return self.weight
        made = dequantise(self.codes, self.scales, self.wide_type())
        return in_places(made, self.order) if self.form.sorts else made

    def wide_type(self) -> torch.dtype:
        return self.lora_A.weight.dtype

    def beginning(
        self, read: Callable[[], Tensor], seed: str, order: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of everything before the first step.

        Args:
            read: Returns the trained matrix, `[O, I]` float32.
            seed: What decides what is drawn. At first the layer computes what it did.
            order: As of `MadeWide.held`.
        """
        weight = read()
        begun = self._begun(weight, seed)
        if self._takes_out:
            weight = begun.within(weight, -self.scale)
        if self.bits is None:
            yield "weight", weight
        else:
            held = dict(self.held(weight, order))
            yield from held.items()
            weight = dequantise(held["codes"], held["scales"], torch.float32)
            if self.form.sorts:
                weight = in_places(weight, held["order"])
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


_Targets = list[tuple[str, nn.Module]]
"""Names of modules, and of parameters of modules with experts; and the modules."""


def add_adapters(model: nn.Module, config: LoraConfig, *, in_tower: bool = False) -> nn.Module:
    """Freeze a model and put adapters beside its linear layers, experts and embeddings, in place;
    return it.

    A classifier's head has no adapter: it is trained itself, as are `modules_to_save`. What looks
    at images has some only with `in_tower`.

    Raises:
        ConfigError: a target names none of them, or experts or embeddings get what their adapters
            do not have; or no module has the name of one that is trained itself.
    """
    model.requires_grad_(False)
    saved = saved_modules(model, config, in_tower=in_tower)
    targets = _targets(model, config, saved, in_tower)
    narrow = _narrowing(model, config, saved, targets)
    wide = replace(config, bits=None)  # one object: equal modules are known by holding the same
    for name, module in targets:
        parent, _, last = name.rpartition(".")
        own = config if _weight_of(name, module) in narrow.matrices else wide
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, LoraLinear(module, own))
        elif isinstance(module, nn.Embedding):
            check_embedding(model, name, config)
            adapt_embedding(module, config)
        else:
            adapt(module, last, own)
    if config.bits is not None:
        narrow.narrow(model, config, but={_weight_of(*target) for target in targets})
    if (head := head_of(model)) is not None:
        head.requires_grad_(True)
    for module in saved.values():
        module.requires_grad_(True)
    if saved and not in_tower:  # which may be a part of one
        freeze_tower(model)
    return model


def narrowing_of(model: nn.Module, config: LoraConfig, *, in_tower: bool = False) -> Narrowing:
    """Return what `add_adapters` would hold in few bits; changes nothing.

    Raises:
        ConfigError: as `add_adapters`.
    """
    saved = saved_modules(model, config, in_tower=in_tower)
    return _narrowing(model, config, saved, _targets(model, config, saved, in_tower))


def _narrowing(
    model: nn.Module, config: LoraConfig, saved: Mapping[str, nn.Module], targets: _Targets
) -> Narrowing:
    if config.bits is None:
        return Narrowing({}, {})
    return narrowing(model, saved, {_weight_of(*target) for target in targets})


def _weight_of(target: str, module: nn.Module) -> str:
    """Return the name of the parameter that a target's adapter is of."""
    whole = isinstance(module, nn.Linear | nn.Embedding)
    return f"{target}.weight" if whole else target


def merged(weight: Tensor, adapter: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return what a frozen matrix becomes with its adapter in it, computed in float32.

    Args:
        weight: `[O, I]`, or an embedding `[V, D]`.
        adapter: Its tensors by the names of `ADAPTER_PARTS`.
        scale: See `LoraConfig.scale`.
    """
    if EMBEDDING_PARTS[0] in adapter:
        a, b = (adapter[part].float() for part in EMBEDDING_PARTS)
        return weight.float() + (b @ a).T * scale
    product = adapter["lora_B.weight"].float() @ adapter["lora_A.weight"].float()
    adapted = weight.float() + product * scale
    if "lora_magnitude_vector" in adapter:
        adapted *= (adapter["lora_magnitude_vector"].float() / adapted.norm(dim=1))[:, None]
    return adapted


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear | ExpertAdapter | LoraEmbedding]:
    kinds = (LoraLinear, ExpertAdapter, LoraEmbedding)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def begun_layers(model: nn.Module) -> dict[str, Any]:
    """Return what a `beginning` fills: adapted layers, and what is held in few bits beside them."""
    adapted: dict[str, Any] = adapted_layers(model)
    narrow = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NarrowLinear | NarrowParameter)
        if name.rpartition(".")[0] not in adapted  # which fills its own
    }
    return {**adapted, **narrow}


def _targets(
    model: nn.Module, config: LoraConfig, saved: Mapping[str, nn.Module], in_tower: bool
) -> _Targets:
    heads = (getattr(model, "get_output_embeddings", lambda: None)(), head_of(model))
    linears: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(module is head for head in heads)
        and (in_tower or not is_in_tower(model, name))
    }
    experts = experts_of(model)
    embeddings = {
        name: module
        for name, module in embeddings_of(model).items()
        if in_tower or not is_in_tower(model, name)
    }
    linear_names = {name.rpartition(".")[2] for name in linears}
    expert_names = {each for name in experts for each in _names_of(name)}
    known = linear_names | expert_names | {name.rpartition(".")[2] for name in embeddings}
    wanted = set(config.targets) - {ALL_LINEAR}
    if unknown := sorted(wanted - known):
        raise ConfigError(
            f"--lora targets={unknown[0]} is not a linear layer, embedding or expert of the model."
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
    plain = {**embeddings, **linears}
    found = [(name, m) for name, m in plain.items() if name.rpartition(".")[2] in wanted]
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
