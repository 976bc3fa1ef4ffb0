"""Costs of each layer, measured on fake tensors: exact bytes and FLOPs without memory or time.

The layer really runs, forward and backward, under the same storage tracker that the emulated
device uses; only the data are missing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from atomtrain.analysis.costs.flops import attention_workspace_bytes, more_counters
from atomtrain.analysis.costs.saved import SavedCost, SavedWatcher, is_movable
from atomtrain.analysis.costs.storages import ALIGNED_BYTES, StorageTracker, is_dense
from atomtrain.analysis.export.structure import tensors_among
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.kept_state import keeping_nothing
from atomtrain.errors import AnalysisError, reason_of


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer needs for one micro-batch. Bytes are on the device."""

    name: str
    kind: str
    """Layers of one kind are identical but for their weights."""
    parameters: int
    """Elements, shared weights counted at each user."""
    parameter_bytes: int
    buffer_bytes: int
    """Of buffers that no layer before it has, so that the sum counts each once; of all its buffers
    if it changes them."""
    forward_flops: int
    backward_flops: int
    """Of backward alone, without recomputing."""
    forward_bytes: int
    """Peak growth of forward without a graph, its outputs included."""
    kept_bytes: int
    """Alive after forward with a graph, its outputs included."""
    graph_bytes: int
    """Peak growth of forward with a graph."""
    backward_bytes: int
    """Peak growth of backward above `kept_bytes`, gradients of the inputs included."""
    changes_buffers: bool
    """Forward in training mode writes to a buffer (running statistics)."""
    random: bool
    """Forward draws random numbers."""
    saved: SavedCost
    """What backward needs of forward."""
    all_sent: SavedCost | None = None
    """The same if an offloaded layer sends all of it and makes nothing again; `None`: it makes
    nothing again anyway."""


class ValueSpec(NamedTuple):
    """Shape and type of a value between layers, or the value itself if it is not a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool
    constant: Any = None
    strides: tuple[int, ...] | None = None
    """Of a tensor that is dense but not contiguous."""
    storage_bytes: int = 0
    """Of what the tensor or its gradient lies in, where that is larger: it lives as long."""

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a tensor like the value, without its data."""
        assert self.dtype is not None
        empty = torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.strides is not None:
            empty = empty.view(-1).as_strided(self.shape, self.strides)
        return empty.requires_grad_(self.requires_grad)

    @property
    def n_bytes(self) -> int:
        """Bytes of the value, 0 if it is not a tensor."""
        if self.dtype is None:
            return 0
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes on the device that live as long as the value does there."""
        return max(self.n_bytes, self.storage_bytes)


class ChainCosts(NamedTuple):
    layers: tuple[LayerCost, ...]
    values: Mapping[str, ValueSpec]

    @property
    def remakes(self) -> bool:
        return any(layer.all_sent is not None for layer in self.layers)

    def sending_all(self) -> ChainCosts:
        """Return the costs of the same chain where offloaded layers make nothing again."""
        layers = [
            dataclasses.replace(layer, saved=layer.all_sent or layer.saved, all_sent=None)
            for layer in self.layers
        ]
        return ChainCosts(tuple(layers), self.values)


# Tensors, submodules and hooks of every module.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_RANDOM = torch.Tag.nondeterministic_seeded


class _Measured(NamedTuple):
    cost: LayerCost
    written: tuple[ValueSpec, ...]
    gradient_bytes: tuple[int, ...]
    """Of what the gradient of each value that it reads lies in."""


class _Watcher(StorageTracker):
    random = False

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        self._on_gpu = on_gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _RANDOM in func.tags and not _dropout_is_off(func, args, kwargs or {}):
            self.random = True
            if (kwargs or {}).get("generator") is not None:
                raise AnalysisError(
                    "forward draws random numbers from a torch.Generator of its own, whose state "
                    "recomputing cannot bring back; draw them from torch's default one"
                )
        for given in tensors_among(args, kwargs):
            if given.requires_grad and type(given) is not FakeTensor:
                raise AnalysisError(
                    f"the loss or a layer uses a tensor of shape {list(given.shape)} that is "
                    "trained and is not given to it; make it a parameter of the model, or detach() "
                    "it; take out torch.utils.checkpoint, for the engine recomputes by itself"
                )
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if inside_bytes := attention_workspace_bytes(func, args, on_gpu=self._on_gpu):
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside_bytes)
        return result


def _dropout_is_off(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p")
            return bool((argument.default_value if given is None else given) == 0.0)
    return False


def layer_costs(
    chain: Chain,
    inputs: Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    on_gpu: bool = False,
) -> ChainCosts:
    """Return the costs of every layer; identical layers are run once.

    Args:
        chain: Its parameters may be on the meta device.
        inputs: One micro-batch, by the chain's input names.
        device: The kind of device whose kernels are to be assumed.
        on_gpu: Whether the model will be on a GPU, though `device` is the processor.

    Raises:
        AnalysisError: a layer cannot run on what the layers before it write, or the loss is no
            scalar.
    """
    values = {name: _spec_of_input(inputs[name]) for name in chain.inputs}
    measured: dict[Any, _Measured] = {}
    gradient_bytes: dict[str, int] = {}
    kinds: dict[Any, str] = {}
    costs = []
    seen: set[int] = set()
    for layer in chain.layers:
        specs = [values[name] for name in layer.reads]
        key = _signature(layer, specs)
        if key not in measured:
            kinds[key] = f"{type(layer.module).__name__}-{len(kinds)}"
            try:
                measured[key] = _measure(
                    layer, specs, kinds[key], torch.device(device), on_gpu=on_gpu
                )
            except RuntimeError as error:
                raise AnalysisError(_cannot_run(layer, specs, error)) from error
        cost, written, gradients = measured[key]
        if not cost.changes_buffers:
            cost = dataclasses.replace(cost, buffer_bytes=_fresh_bytes(layer, seen))
        seen.update(id(buffer) for buffer in layer.buffers.values())
        costs.append(dataclasses.replace(cost, name=layer.name))
        values.update(zip(layer.writes, written, strict=True))
        for name, n_bytes in zip(layer.reads, gradients, strict=True):
            gradient_bytes[name] = max(n_bytes, gradient_bytes.get(name, 0))
    for name, n_bytes in gradient_bytes.items():
        storage_bytes = max(n_bytes, values[name].storage_bytes)
        values[name] = values[name]._replace(storage_bytes=storage_bytes)
    loss = values[chain.loss]
    if loss.dtype is None or torch.Size(loss.shape).numel() != 1:
        given = "not a tensor" if loss.dtype is None else f"of shape {list(loss.shape)}"
        raise AnalysisError(f"the loss is {given}; it must be a scalar, such as a mean")
    return ChainCosts(tuple(costs), values)


def _fresh_bytes(layer: Layer, seen: set[int]) -> int:
    fresh = {id(b): b for b in layer.buffers.values() if id(b) not in seen}.values()
    return sum(buffer.numel() * buffer.element_size() for buffer in fresh)


def _cannot_run(layer: Layer, specs: Sequence[ValueSpec], error: RuntimeError) -> str:
    shapes = ", ".join(
        f"{name} {list(spec.shape)}" for name, spec in zip(layer.reads, specs, strict=True)
    )
    reason = reason_of(error)
    advice = "check the example's shapes and types"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        reason = f"what it does depends on data ({reason}), and costs are measured without data"
        advice = "compute it with numbers and shapes that are known before"
    if "in-place" in reason:
        advice = "a layer must not change its inputs: use inplace=False"
    return f"layer {layer.name!r} cannot run on {shapes}: {reason}; {advice}"


def _spec_of(value: Any) -> ValueSpec:
    if isinstance(value, Tensor):
        strided = is_dense(value) and not value.is_contiguous()
        strides = tuple(value.stride()) if strided else None
        return ValueSpec(tuple(value.shape), value.dtype, value.requires_grad, strides=strides)
    return ValueSpec((), None, False, value)


def _spec_of_input(value: Any) -> ValueSpec:
    """Return what the caller gives; of the next micro-batch it may begin anywhere in memory."""
    spec = _spec_of(value)
    if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
        return spec._replace(storage_bytes=spec.n_bytes + ALIGNED_BYTES - value.element_size())
    return spec


def _specs_of(
    written: Sequence[Any],
    specs: Sequence[ValueSpec],
    arguments: Sequence[Any],
    held: Iterable[Tensor],
) -> tuple[ValueSpec, ...]:
    """Return what a layer writes, given what it reads and the weights that are held anyway."""
    known = {tensor.untyped_storage()._cdata: 0 for tensor in held}
    for spec, argument in zip(specs, arguments, strict=True):
        if isinstance(argument, Tensor):
            known[argument.untyped_storage()._cdata] = spec.held_bytes
    found = []
    for value in written:
        spec = _spec_of(value)
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            n_bytes = known.get(storage._cdata, storage.nbytes())
            spec = spec._replace(storage_bytes=n_bytes if n_bytes > spec.n_bytes else 0)
        found.append(spec)
    return tuple(found)


def _signature(layer: Layer, specs: Sequence[ValueSpec]) -> Any:
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*layer.parameters.items(), *layer.buffers.items())
    )
    # Tied weights inside the layer are one storage, so which names share one matters.
    sharing = tuple(_first_positions([id(tensor) for tensor in layer.parameters.values()]))
    constants = tuple(repr(spec.constant) for spec in specs)
    shapes = tuple((s.shape, s.strides, s.storage_bytes, s.dtype, s.requires_grad) for s in specs)
    return (
        type(layer.module), repr(layer.module), _attributes(layer),
        tensors, sharing, shapes, constants,
    )  # fmt: skip


def _attributes(layer: Layer) -> tuple[Any, ...]:
    """Return what a layer's modules hold beside tensors and modules: it may steer forward."""
    plain = (bool, int, float, str, tuple, list, type(None), torch.dtype)
    return tuple(
        (name, repr(value) if isinstance(value, plain) else id(value))
        for module in layer.module.modules()
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES
    )


def _first_positions(keys: Sequence[int]) -> list[int]:
    return [list(keys).index(key) for key in keys]


def _measure(
    layer: Layer,
    specs: Sequence[ValueSpec],
    kind: str,
    device: torch.device,
    *,
    on_gpu: bool,
) -> _Measured:
    # What a loss closes over, such as the weights of classes, has data.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        tensors = _fake_tensors(layer, device)
        unique = {id(tensor): tensor for tensor in tensors.values()}.values()
        for tensor in unique:
            if tensor.requires_grad:
                tensor.grad = torch.empty_like(tensor)
        arguments = [_fake_value(spec, device) for spec in specs]
        gradients = [0] * len(arguments)
        hooks = [
            value.register_hook(functools.partial(_note, gradients, index))
            for index, value in enumerate(arguments)
            if isinstance(value, Tensor) and value.requires_grad
        ]
        tracker = _Watcher(on_gpu=on_gpu)
        with torch.no_grad(), keeping_nothing(layer, tensors), tracker:
            written = layer.run(tensors, arguments)
            forward_bytes = tracker.peak_bytes
        changes = any(tensors[name]._version for name in layer.buffers)
        del written
        with tracker, FlopCounterMode(display=False, custom_mapping=more_counters()) as flops:
            tracker.reset_peak()
            before_bytes = tracker.live_bytes
            written = layer.run(tensors, arguments)
            out = _specs_of(written, specs, arguments, tensors.values())
            kept_bytes = tracker.live_bytes - before_bytes
            graph_bytes = tracker.peak_bytes - before_bytes
            forward_flops = flops.get_total_flops()
            roots = [value for value in written if isinstance(value, Tensor)]
            roots = [value for value in roots if value.requires_grad]
            del written
            backward_bytes = 0
            if roots:
                seeds = [torch.empty_like(root) for root in roots]
                seed_bytes = tracker.live_bytes - before_bytes - kept_bytes
                tracker.reset_peak()
                torch.autograd.backward(roots, seeds)
                # The seeds stand for gradients that the executor already holds.
                backward_bytes = tracker.peak_bytes - before_bytes - kept_bytes - seed_bytes
            backward_flops = flops.get_total_flops() - forward_flops
        for hook in hooks:
            hook.remove()
        saved = _measure_saved(layer, tensors, arguments, on_gpu=on_gpu)
        all_sent = None
        if saved.sent_bytes < saved.inner_bytes:
            all_sent = _measure_saved(layer, tensors, arguments, on_gpu=on_gpu, remake=False)
    parameters = {id(p): p for p in layer.parameters.values()}.values()
    buffers = {id(b): b for b in layer.buffers.values()}.values()
    cost = LayerCost(
        name=layer.name,
        kind=kind,
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        forward_bytes=forward_bytes,
        kept_bytes=kept_bytes,
        graph_bytes=graph_bytes,
        backward_bytes=backward_bytes,
        changes_buffers=changes,
        random=tracker.random,
        saved=saved,
        all_sent=all_sent,
    )
    return _Measured(cost, out, tuple(gradients))


def _note(found: list[int], index: int, gradient: Tensor) -> None:
    """Note how large what a gradient lies in is."""
    found[index] = gradient.untyped_storage().nbytes()


def _measure_saved(
    layer: Layer,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any],
    *,
    on_gpu: bool,
    remake: bool = True,
) -> SavedCost:
    """Run the layer once more; what it saves leaves at once and comes back when it is needed.

    Without `remake` all of it comes back, and nothing is made again.
    """
    tracker = _Watcher(on_gpu=on_gpu)
    watcher = SavedWatcher(list(tensors.values()), remake=remake)
    for value in arguments:
        if isinstance(value, Tensor):
            value.grad = None
    with tracker:
        with watcher.watching():
            written = layer.run(tensors, arguments)
        forward_bytes = tracker.peak_bytes
        inner = watcher.inner([*arguments, *written])
        reads = tuple(watcher.is_saved(value) for value in arguments)
        writes = tuple(watcher.is_saved(value) for value in written)
        roots = [value for value in written if isinstance(value, Tensor) and value.requires_grad]
        movable = is_movable(roots)
        edges = [get_gradient_edge(root) for root in roots]
        seeds = [torch.empty_like(root) for root in roots]
        del written, roots
        tracker.reset_peak()
        before_bytes = tracker.live_bytes
        if edges:
            torch.autograd.backward(edges, seeds)
        backward_bytes = tracker.peak_bytes - before_bytes
    return SavedCost(
        inner_bytes=sum(inner) + watcher.remade_bytes,
        sent_bytes=sum(inner),
        sent=len(inner),
        reads=reads,
        writes=writes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        movable=movable,
        remade_traffic_bytes=watcher.remade_traffic_bytes,
    )


def _fake_tensors(layer: Layer, device: torch.device) -> dict[str, Tensor]:
    fakes: dict[int, Tensor] = {}
    tensors = {}
    for name, tensor in (*layer.parameters.items(), *layer.buffers.items()):
        if id(tensor) not in fakes:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            fakes[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
        tensors[name] = fakes[id(tensor)]
    return tensors


def _fake_value(spec: ValueSpec, device: torch.device) -> Any:
    if spec.dtype is None:
        return spec.constant
    return spec.empty(device)
