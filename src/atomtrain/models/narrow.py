"""What `bits` narrows of a frozen model: its linear layers and its experts, adapted or not.

That is what users of bitsandbytes expect. Embeddings, norms, the output head and what routes to
experts stay wide, and so does what is trained itself.

A linear layer becomes a `NarrowLinear`. Other modules keep their own forward: it sees an attribute
in the place of the parameter, which is made wide for that call.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.models.forms import Form, form_of
from atomtrain.models.heads import head_of
from atomtrain.models.lora_config import MXFP4, LoraConfig
from atomtrain.models.lora_saved import is_within
from atomtrain.models.quantised import in_places, quantised_linear, wide

_BESIDE = "expert_lora"
"""The name under which a module has what stands beside its parameters: adapters, codes."""
_ROUTERS = {"router", "gate"}
_MOST_TOLD = 3


class MadeWide(nn.Module):
    """Code that reads `weight` gets it made wide, where it is held in few bits."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "codes" in (parameters := self.__dict__.get("_parameters", {})):
            made = wide(parameters["codes"], parameters["scales"], self.wide_type())
            order = parameters.get("order")
            return made if order is None else in_places(made, order)
        return super().__getattr__(name)

    def product(self, inputs: Tensor) -> Tensor:
        """Return `inputs @ weight.T` of a matrix in few bits."""
        order = self._parameters.get("order")
        if order is not None:
            inputs = inputs.index_select(-1, order)
        out: Tensor = quantised_linear(inputs, self.codes, self.scales)
        return out

    def hold(self, form: Form, outputs: int, like: Tensor, inputs: int) -> None:
        """Make room for a matrix `[outputs, inputs]` on the device of `like`."""
        self.form = form
        self.codes, self.scales = map(frozen, form.empty(outputs, inputs, like))
        if form.sorts:
            self.order = frozen(like.new_empty(inputs, dtype=torch.int32))

    def held(self, weight: Tensor, order: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of what is held of a matrix, float32.

        Args:
            weight: `[O, I]`.
            order: `[I]`, its columns sorted by the tile that they are published in; `None`: they
                are so as they lie.
        """
        if self.form.sorts:
            order = torch.arange(weight.shape[1]) if order is None else order
            yield "order", order.int()
            weight = weight[:, order]
        packed = self.form.packed(weight)
        yield "codes", packed.codes
        yield "scales", packed.scales

    def wide_type(self) -> torch.dtype:
        """Return the type that the model computes in."""
        raise NotImplementedError


class NarrowLinear(MadeWide):
    """A frozen linear layer in few bits, without an adapter: `[..., I]` to `[..., O]`."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self._type = base.weight.dtype
        form = form_of(config, base.in_features)
        self.hold(form, base.out_features, base.weight, base.in_features)
        if self.form.has_bits_as_scales:
            self.kind = frozen(base.weight.new_empty(1))
        self.bias = None if base.bias is None else frozen(base.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        product = self.product(inputs)
        return product if self.bias is None else product + self.bias

    def wide_type(self) -> torch.dtype:
        # With --precision bf16 the scales become bfloat16, as all of the model does.
        told = self.kind if self.form.has_bits_as_scales else self.scales
        return self._type if told.dtype == torch.float32 else told.dtype

    def beginning(
        self, read: Callable[[], Tensor], _: str, order: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of what is held; `read` returns the matrix, float32, and `order`
        is as of `held`."""
        yield from self.held(read(), order)
        if self.form.has_bits_as_scales:
            yield "kind", torch.zeros(1)


class NarrowParameter(nn.Module):
    """A frozen parameter `[..., I]` in few bits: the experts of a layer, or a matrix.

    In MXFP4 experts are `[E, I, O]`, and lie as they are published, output by output.
    """

    def __init__(self, base: Tensor, form: Form) -> None:
        super().__init__()
        self.form, self.mxfp4 = form, form.published == MXFP4
        self.shape = base.mT.shape if self.mxfp4 else base.shape  # as it lies
        rows = self.shape[:-1].numel()  # those of all experts, one below the other
        self.codes, self.scales = map(frozen, form.empty(rows, self.shape[-1], base))

    def current(self, _: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        """Return it made wide, in the type that its module computes in."""
        assert dtype is not None, "the module is called without a tensor of floats"
        made: Tensor = wide(self.codes, self.scales, dtype).view(self.shape)
        return made.mT if self.mxfp4 else made

    def beginning(self, read: Callable[[], Tensor], _: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of what is held; `read` returns the parameter, float32."""
        weight = read()
        parts = weight if weight.ndim > 2 else weight[None]  # what is made meanwhile is large
        packed = [self.form.packed(part.mT if self.mxfp4 else part) for part in parts]
        yield "codes", torch.cat([each.codes for each in packed])
        yield "scales", torch.cat([each.scales for each in packed])


def narrowed(base: Tensor, config: LoraConfig, *, transposed: bool) -> NarrowParameter:
    """Return room for a parameter in the bits that `config` says."""
    if transposed and base.ndim == 3 and config.kept[0] == MXFP4:
        form = form_of(config, base.shape[1], transposed_experts=True)
        if form.published == MXFP4:
            return NarrowParameter(base, form)
    return NarrowParameter(base, form_of(config, base.shape[-1])._replace(sorts=False))


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module's experts are `[E, I, O]`, as peft tells it."""
    return bool(getattr(module, "is_transposed", False))


class _Beside(nn.Module):
    """Goes before a class of modules: its forward sees other values in place of parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        beside: Mapping[str, Any] = self._modules[_BESIDE]._modules  # type: ignore[union-attr]
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        dtype = next((each.dtype for each in given if each.is_floating_point()), None)
        # An attribute of the instance hides the parameter of that name. Computed once a call: the
        # module may look at it once for each expert.
        for name, each in beside.items():
            self.__dict__[name] = each.current(self._parameters.get(name), dtype)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in beside:
                self.__dict__.pop(name, None)


@functools.cache
def _class_beside(base: type[nn.Module]) -> type[nn.Module]:
    # One class for each of the model's, since modules of one class are traced once for all.
    return type(f"Adapted{base.__name__}", (_Beside, base), {})


def put_beside(module: nn.Module, name: str, made: nn.Module, *, instead: bool) -> None:
    """Have a module's forward see what `made.current` returns as its parameter `name`, in place.

    With `instead` the parameter goes.
    """
    if not isinstance(module, _Beside):
        module.__class__ = _class_beside(type(module))  # type: ignore[arg-type]
        module.add_module(_BESIDE, nn.ModuleDict())
    module.get_submodule(_BESIDE).add_module(name, made)
    if instead:
        delattr(module, name)


def adapter_of(parameter: str) -> str:
    """Return the name of what stands beside a parameter."""
    path, _, name = parameter.rpartition(".")
    return f"{path}.{_BESIDE}.{name}"


def adapted_by(path: str) -> str | None:
    """Return the name of the parameter that a module stands beside, `None` if it is another."""
    path, _, name = path.rpartition(".")
    path, _, middle = path.rpartition(".")
    return f"{path}.{name}" if middle == _BESIDE else None


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


class Narrowing(NamedTuple):
    """Which matrices of a model are held in few bits."""

    matrices: dict[str, nn.Module]
    """Their modules, by the parameter's name."""
    wide: dict[str, str]
    """Why others stay as they are, by the parameter's name."""

    def narrow(self, model: nn.Module, config: LoraConfig, but: Collection[str]) -> None:
        """Hold all matrices `but` some in the bits that `config` says, in place."""
        assert config.bits is not None
        for name, module in self.matrices.items():
            if name in but:
                continue
            path, _, own = name.rpartition(".")
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                parent, _, last = path.rpartition(".")
                setattr(model.get_submodule(parent), last, NarrowLinear(module, config))
            else:
                base, transposed = module.get_parameter(own), is_transposed(module)
                made = narrowed(base, config, transposed=transposed)
                put_beside(module, own, made, instead=True)

    def told(self, bits: int) -> str | None:
        """Return a line about what stays as it is, `None` if everything is narrow."""
        if not self.wide:
            return None
        first = [f"{name} {why}" for name, why in self.wide.items()][:_MOST_TOLD]
        more = len(self.wide) - len(first)
        rest = f"; and {more} more" if more else ""
        one = len(self.wide) == 1
        count = "a matrix as it is" if one else f"{len(self.wide)} matrices as they are"
        return f"--lora bits={bits} leaves {count}: {'; '.join(first)}{rest}"


def narrowing(
    model: nn.Module, trained: Mapping[str, nn.Module], adapted: Collection[str]
) -> Narrowing:
    """Return what is held in few bits of a model that has no adapters yet.

    Args:
        model: May be on the meta device.
        trained: Modules that are trained themselves, by path.
        adapted: Names of parameters that get an adapter.
    """
    heads = (getattr(model, "get_output_embeddings", lambda: None)(), head_of(model))
    found: dict[str, nn.Module] = {
        name: module
        for name, module in experts_of(model).items()
        if name in adapted or "expert" in f"{name} {type(module).__name__}".lower()
    }
    counts = {model.get_parameter(name).shape[0] for name in found}
    for path, module in model.named_modules():
        routes = isinstance(module, nn.Linear) and module.out_features in counts
        routes = routes and not _ROUTERS.isdisjoint(path.split("."))
        is_head = any(module is head for head in heads)
        if path and isinstance(module, nn.Linear) and not routes and not is_head:
            found[f"{path}.weight"] = module
    users = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    narrow, wide_ones = {}, {}
    for name, module in found.items():
        path = name.rpartition(".")[0]
        weight = model.get_parameter(name)
        if path in trained or is_within(path, trained):
            continue
        if users[id(weight)] > 1:
            wide_ones[name] = "is shared with another layer"
        elif weight.shape[-1] % 2:
            wide_ones[name] = f"has rows of {weight.shape[-1]} numbers, which must be even"
        else:
            narrow[name] = module
    return Narrowing(narrow, wide_ones)


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)
