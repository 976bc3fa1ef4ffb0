"""One compiled template for all layers of a kind: compiled once, run with each layer's tensors.

Compiling is `torch.compile`; blocks of a transformer differ in their parameters only, and these are
arguments here. So the time to compile does not grow with depth. Compiled code adds in another order
than the operations one by one: results differ in their last bits from those of a model that is not
compiled, not from step to step or from plan to plan. For that a layer runs the same code whether
its graph is wanted or not: code for forward alone is fused in another way.

A layer without products (an embedding) gains nothing and stays as it is. So does one with a
`torch.autograd.Function`: traced, its backward may be called with other gradients than by autograd.

The emulated device sees operations only, and compiled code allocates by itself. So what a kind of
layer takes inside is measured once (`calibration/compiled_costs.py`), and claimed each time the
layer runs. What outlives the code is counted as it is: results, what it saves for backward,
gradients.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch._aot_autograd.schemas import AOTConfig
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.storages import StorageTracker, is_dense
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.front import OwnCode
from atomtrain.analysis.layers.own_ending import Ending
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.gpus import vendor_of
from atomtrain.engine.execution.saved_script import in_other_mode
from atomtrain.errors import ConfigError, reason_of
from atomtrain.files import default_cache


class Inside(NamedTuple):
    """Bytes by which memory grows at most while a layer's code runs."""

    forward_bytes: int
    """Results and what is saved included."""
    backward_bytes: int
    """From the moment at which all that was saved is there."""


def active_tracker() -> StorageTracker | None:
    """Return what counts the storages that this thread allocates, or `None`."""
    stack = _get_current_dispatch_mode_stack()
    found = next((mode for mode in reversed(stack) if isinstance(mode, StorageTracker)), None)
    return found if found is not None and found.counts else None


def run_counted(
    tracker: StorageTracker,
    name: str,
    inside: Inside,
    values: Sequence[Any],
    run: Callable[[], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Run a compiled layer; count what it takes, now and in its backward.

    Args:
        tracker: Counts.
        name: Of the layer.
        inside: What its code takes.
        values: What it reads.
        run: Runs it.

    Raises:
        DeviceMemoryError: by the tracker, if it is too much.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = (_itself, _itself) if outer is None else outer

    def counted_pack(tensor: Tensor) -> Any:
        tracker.adopt(tensor, name)
        packed = pack(tensor)
        if isinstance(packed, Tensor):
            tracker.adopt(packed, name)  # a copy, of a buffer that changes
        return packed

    def counted_unpack(packed: Any) -> Tensor:
        tensor: Tensor = unpack(packed)
        tracker.expect(inside.backward_bytes, name)
        return tensor

    tracker.expect(inside.forward_bytes, name)
    with saved_tensors_hooks(counted_pack, counted_unpack):
        written = run()
    for value in written:
        if isinstance(value, Tensor):
            tracker.adopt(value, name)

    def adopt_gradients(gradients: Any, _: Any) -> None:
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                tracker.adopt(gradient, name)

    for node in _own_nodes(written, values):
        node.register_hook(adopt_gradients)
    return written


def _own_nodes(written: Sequence[Any], values: Sequence[Any]) -> Iterator[Node]:
    """Yield the nodes of compiled code between what a layer reads and what it writes."""
    seen = {value.grad_fn for value in values if isinstance(value, Tensor)}
    waiting = [value.grad_fn for value in written if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        waiting += [following for following, _ in node.next_functions]


def _itself(tensor: Tensor) -> Tensor:
    return tensor.detach()


_AT_ONCE = "force_non_lazy_backward_lowering"
_WATCHED = "_is_in_any_mode_without_ignore_compile_internals"
TRACING = threading.Lock()
"""Held while something is compiled, and while optimizers of engines that compile run: compiling
switches flags of the whole process, by which optimizers choose their arithmetic."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_logger = logging.getLogger(__name__)
Template = Callable[[dict[str, Tensor], tuple[Any, ...]], Any]


@dataclass(frozen=True)
class CompiledLayer(Layer):
    """A layer that runs its kind's template."""

    template: Template | None = dataclasses.field(default=None, repr=False)
    device_type: str = "cpu"
    """For which it is compiled: on the host of a GPU it runs operation by operation."""
    gradients: tuple[bool, ...] = ()
    """Which of the values that it reads have a gradient."""
    inside: Inside | None = None
    """What the code takes of memory, once it is measured."""

    def run(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        if not self._is_there(tensors, values):
            return super().run(tensors, values)
        # A copy on the device is contiguous, whatever the host has, and other strides are other
        # code, which adds in another order.
        values = [_dense(value) for value in values]
        if torch.is_grad_enabled() or in_other_mode(self.module):
            return self._compiled(tensors, values)
        with torch.enable_grad():
            leaves = [_leaf_of(v, has) for v, has in zip(values, self.gradients, strict=True)]
            written = self._compiled(tensors, leaves)
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in written)

    def call(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> Any:
        if not self._is_there(tensors, values):
            return super().call(tensors, values)
        assert self.template is not None
        return self.template(dict(tensors), tuple(values))

    def _is_there(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> bool:
        found = next((v for v in (*tensors.values(), *values) if isinstance(v, Tensor)), None)
        return found is not None and found.device.type == self.device_type

    def _compiled(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        tracker = active_tracker()
        run = super().run
        if tracker is None or self.inside is None:
            return run(tensors, values)
        return run_counted(tracker, self.name, self.inside, values, lambda: run(tensors, values))


def require_compilable(device: Device) -> None:
    """Refuse a device that cannot run compiled layers.

    Raises:
        ConfigError: the compiler for it is missing, or the GPU is too old for it.
    """
    if device.torch_device.type != "cpu":
        _require_triton(device)
        return
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"compiling for the CPU needs a C++ compiler, and there is no {compiler}; install it, "
            "name another one in the environment variable CXX, or turn compile off"
        )


def _require_triton(device: Device) -> None:
    from torch.utils._triton import has_triton_package

    if not has_triton_package():
        raise ConfigError(
            "compiling for a GPU needs Triton, which this torch has not brought along; "
            "pip install triton, or turn compile off"
        )
    vendor = vendor_of(device.torch_device)
    why = vendor and vendor.why_not_compiled(device.torch_device)
    if why:
        raise ConfigError(f"{device.name} {why}; turn compile off")


def compiled(
    chain: Chain, costs: ChainCosts, device: torch.device, backend: str = "inductor"
) -> Chain:
    """Return the chain with layers that run compiled, one template for each kind.

    What is compiled is kept for later runs in the user's cache folder, or where the environment
    variable `TORCHINDUCTOR_CACHE_DIR` says.

    Args:
        chain: Any.
        costs: Of the chain; they say which layers are of one kind.
        device: Where the layers will run.
        backend: Of `torch.compile`.
    """
    os.environ.setdefault(CACHE_VARIABLE, str(default_cache() / "compiled"))
    templates: dict[str, Template] = {}
    layers: list[Layer] = []
    own_backward: dict[str, list[str]] = {}
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        # A model's own code would be compiled anew for each size of images or labels.
        own_code = any(isinstance(each, OwnCode | Ending) for each in layer.module.modules())
        if own_code or not cost.forward_flops or not cost.saved.movable:
            layers.append(layer)
            if not cost.saved.movable:
                own_backward.setdefault(cost.kind, []).append(layer.name)
            continue
        if cost.kind not in templates:
            templates[cost.kind] = _template(layer, backend)
        values = {f.name: getattr(layer, f.name) for f in dataclasses.fields(Layer) if f.init}
        layers.append(
            CompiledLayer(
                **values,
                template=templates[cost.kind],
                device_type=device.type,
                gradients=tuple(costs.values[name].requires_grad for name in layer.reads),
            )
        )
    for names in own_backward.values():
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        _logger.warning(
            "layer %r%s has a torch.autograd.Function, so it is not compiled", names[0], more
        )
    return dataclasses.replace(chain, layers=tuple(layers))


def _template(layer: Layer, backend: str) -> Template:
    module = layer.module
    known: dict[tuple[Any, ...], Template] = {}

    def run(tensors: dict[str, Tensor], values: tuple[Any, ...]) -> Any:
        return torch.func.functional_call(module, tensors, values)

    def template(tensors: dict[str, Tensor], values: tuple[Any, ...]) -> Any:
        described = (_described(value) for value in (*tensors.values(), *values))
        key = (torch.is_grad_enabled(), in_other_mode(module), *described)
        # A mode that watches operations would have each of them run by itself.
        with _disable_current_modes():
            if key in known:
                return known[key](tensors, values)
            # Backward too: later the optimizer runs beside it, and on a GPU another thread.
            with TRACING, _at_once():
                if key not in known:  # else another device's thread has been here
                    made: Callable[..., Any]
                    made = torch.compile(_copy_of(run), backend=backend, dynamic=False)
                    try:
                        written = made(tensors, values)
                    except torch._dynamo.exc.TorchDynamoException as error:
                        why = reason_of(getattr(error, "inner_exception", error))
                        raise ConfigError(
                            f"layer {layer.name!r} cannot be compiled: {why}; install the compiler "
                            "or Python's headers if they are missing (apt-get install g++ "
                            "python3-dev), or turn compile off"
                        ) from error
                    known[key] = made  # only now: who finds it need not wait for the lock
                    return written
            return known[key](tensors, values)

    return template


@contextmanager
def _at_once() -> Iterator[None]:
    """Have backward compiled with forward, not when it is first called."""
    if hasattr(torch._functorch.config, _AT_ONCE):
        with torch._functorch.config.patch({_AT_ONCE: True}):
            yield
        return
    # torch 2.9 has no such option, and goes by a flag where modes were disabled: it would not
    # compile, and not say so.
    plain, watched = AOTConfig.__init__, getattr(_python_dispatch, _WATCHED)

    def begin(self: AOTConfig, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, _AT_ONCE: True})

    AOTConfig.__init__ = begin  # type: ignore[method-assign]
    setattr(_python_dispatch, _WATCHED, False)
    try:
        yield
    finally:
        AOTConfig.__init__ = plain  # type: ignore[method-assign]
        setattr(_python_dispatch, _WATCHED, watched)


def _copy_of(function: Any) -> Any:
    """Return the same function with code of its own, by which torch finds what it has compiled.

    So it never takes what was compiled for other shapes, whose last bits may differ, and never
    has so much for one function that it compiles no more.
    """
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None,
        function.__closure__,
    )  # fmt: skip
    copy.__module__ = function.__module__
    return copy


def _dense(value: Any) -> Any:
    return value if not isinstance(value, Tensor) or is_dense(value) else value.contiguous()


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), repr(value)


def _leaf_of(value: Any, requires_grad: bool) -> Any:
    """Return a tensor as a new leaf of the graph; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(requires_grad)
    return value
