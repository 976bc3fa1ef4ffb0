"""One compiled template for all layers of a kind: compiled once, run with each layer's tensors.

Compiling is `torch.compile`; blocks of a transformer differ in their parameters only, and these are
arguments here. So the time to compile does not grow with depth. Compiled code adds in another order
than the operations one by one: results differ in their last bits from those of a model that is not
compiled, not from step to step or from plan to plan.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import ConfigError

TRACING = threading.Lock()
"""Held while something is compiled, and while optimizers of engines that compile run: compiling
switches flags of the whole process, by which optimizers choose their arithmetic."""
Template = Callable[[dict[str, Tensor], tuple[Any, ...]], Any]


@dataclass(frozen=True)
class CompiledLayer(Layer):
    """A layer that runs its kind's template."""

    template: Template | None = dataclasses.field(default=None, repr=False)

    def call(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> Any:
        assert self.template is not None
        return self.template(dict(tensors), tuple(values))


def require_compilable(device: Device) -> None:
    """Refuse a device that cannot run compiled layers.

    Raises:
        ConfigError: it is emulated, or the processor and there is no compiler for it.
    """
    if isinstance(device, EmulatedDevice):
        raise ConfigError(
            "the emulated device counts the memory of every operation, which compiled code does "
            "not show; leave compile out, or choose the device cpu or cuda"
        )
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.torch_device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"compiling for the CPU needs a C++ compiler, and there is no {compiler}; install it, "
            "name another one in the environment variable CXX, or leave compile out"
        )


def compiled(chain: Chain, costs: ChainCosts, backend: str = "inductor") -> Chain:
    """Return the chain with layers that run compiled, one template for each kind.

    Args:
        chain: Any.
        costs: Of the chain; they say which layers are of one kind.
        backend: Of `torch.compile`.
    """
    templates: dict[str, Template] = {}
    layers = []
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        if cost.kind not in templates:
            templates[cost.kind] = _template(layer, backend)
        values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(Layer) if f.init}
        layers.append(CompiledLayer(**values, template=templates[cost.kind]))
    return dataclasses.replace(chain, layers=tuple(layers))


def _template(layer: Layer, backend: str) -> Template:
    module = layer.module
    seen: set[tuple[Any, ...]] = set()

    def run(tensors: dict[str, Tensor], values: tuple[Any, ...]) -> Any:
        return torch.func.functional_call(module, tensors, values)

    fast: Template = torch.compile(run, backend=backend)

    def template(tensors: dict[str, Tensor], values: tuple[Any, ...]) -> Any:
        described = (_described(value) for value in (*tensors.values(), *values))
        key = (torch.is_grad_enabled(), module.training, *described)
        if key in seen:
            return fast(tensors, values)
        with TRACING:
            seen.add(key)
            return fast(tensors, values)

    return template


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return type(value)
