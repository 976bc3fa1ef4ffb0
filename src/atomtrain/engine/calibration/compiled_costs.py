"""What compiled layers take of memory: measured on the device, since only the compiled code knows.

A compiler fuses operations and decides anew what forward saves for backward: usually less than the
operations one by one, and all of it at the layer's end. Backward gets all of that at its beginning,
and gives the gradients of all parameters at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts, LayerCost
from atomtrain.analysis.costs.profile import example_values, measured_bytes, tensors_of
from atomtrain.analysis.costs.saved import SavedCost
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.calibration.profiling import within_budget
from atomtrain.engine.devices.device import Device
from atomtrain.engine.execution.compiled import CompiledLayer, Inside


def with_compiled_costs(
    chain: Chain, costs: ChainCosts, inputs: Mapping[str, Any], device: Device
) -> tuple[Chain, ChainCosts]:
    """Compile each kind of layer; return the chain whose layers know what they take, and its costs.

    Layers that are not compiled keep their costs. Whether a layer's graph can wait, and its FLOPs,
    are those of its operations.

    Args:
        chain: With real parameters; they are not changed.
        costs: Of its operations one by one.
        inputs: One micro-batch, by the chain's input names.
        device: Idle.

    Raises:
        PlanError: a layer does not fit; says what would do.
    """
    measured: dict[str, LayerCost] = {}
    layers, found = list[Layer](), list[LayerCost]()
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        if not isinstance(layer, CompiledLayer):
            layers.append(layer)
            found.append(cost)
            continue
        if cost.kind not in measured:
            read_bytes = sum(2 * costs.values[name].n_bytes for name in layer.reads)
            needed_bytes = measured_bytes(cost) + read_bytes  # about: that of its operations
            with (
                within_budget(device, f"layer {layer.name!r}", needed_bytes),
                _in_real_memory(device),
                torch.random.fork_rng([]),
                _drawing_alone(device),
            ):
                values = example_values(layer, costs, inputs, device.torch_device)
                measured[cost.kind] = _measured(layer, cost, values, device)
            del values
            device.trim()
        here = measured[cost.kind]
        inside = Inside(here.graph_bytes, here.backward_bytes)
        layers.append(dataclasses.replace(layer, inside=inside))
        found.append(dataclasses.replace(here, name=cost.name, buffer_bytes=cost.buffer_bytes))
    return (
        dataclasses.replace(chain, layers=tuple(layers)),
        ChainCosts(tuple(found), costs.values),
    )


def _in_real_memory(device: Device) -> AbstractContextManager[None]:
    """Give the context in which a GPU computes; what an emulated one would count is nothing yet."""
    return contextlib.nullcontext() if device.torch_device.type == "cpu" else device.computing()


@contextlib.contextmanager
def _drawing_alone(device: Device) -> Iterator[None]:
    """Leave the device's random numbers as they are."""
    state = device.generator.get_state()
    try:
        yield
    finally:
        device.generator.set_state(state)


def _measured(
    layer: CompiledLayer, cost: LayerCost, values: Sequence[Any], device: Device
) -> LayerCost:
    tensors = tensors_of(layer, device.torch_device)
    for _ in range(2):  # the first time it is compiled
        run = _Run(layer, tensors, values, device)
    return run.cost(cost)


class _Run:
    """One micro-batch in a layer, forward and backward."""

    def __init__(
        self,
        layer: CompiledLayer,
        tensors: Mapping[str, Tensor],
        values: Sequence[Any],
        device: Device,
    ) -> None:
        self._saved: dict[int, int] = {}
        own = {_key(tensor) for tensor in tensors.values()}
        written: tuple[Any, ...] = ()

        def pack(tensor: Tensor) -> Tensor:
            if _key(tensor) not in own:
                self._saved[_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        def forward() -> None:
            nonlocal written
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
            with torch.enable_grad(), hooks:
                written = layer.run(tensors, values)

        grown_bytes = _growth_bytes(device, forward)
        read = [_key(value) for value in values if isinstance(value, Tensor)]
        made = {_key(v): v.untyped_storage().nbytes() for v in written if isinstance(v, Tensor)}
        inner = {k: n for k, n in self._saved.items() if k not in made and k not in read}
        fresh_bytes = sum(n for k, n in made.items() if k not in read and k not in own)
        self._inner = list(inner.values())
        self._reads = tuple(self._is_saved(value) for value in values)
        self._writes = tuple(self._is_saved(value) for value in written)
        self._kept_bytes = fresh_bytes + sum(self._inner)
        self._graph_bytes = max(grown_bytes, self._kept_bytes)
        roots = [v for v in written if isinstance(v, Tensor) and v.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        self._backward_bytes = (
            _growth_bytes(device, lambda: torch.autograd.backward(roots, seeds)) if roots else 0
        )
        for value in values:
            if isinstance(value, Tensor):
                value.grad = None  # else the next backward would add to it

    def cost(self, of_operations: LayerCost) -> LayerCost:
        """Return the layer's cost, compiled."""
        saved = SavedCost(
            inner_bytes=sum(self._inner),
            sent_bytes=sum(self._inner),
            sent=len(self._inner),
            reads=self._reads,
            writes=self._writes,
            forward_bytes=self._graph_bytes,
            backward_bytes=sum(self._saved.values()) + self._backward_bytes,
            movable=of_operations.saved.movable,
        )
        return dataclasses.replace(
            of_operations,
            forward_bytes=self._graph_bytes,
            kept_bytes=self._kept_bytes,
            graph_bytes=self._graph_bytes,
            backward_bytes=self._backward_bytes,
            saved=saved,
            all_sent=None,
        )

    def _is_saved(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _key(value) in self._saved


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _growth_bytes(device: Device, work: Callable[[], object]) -> int:
    """Return by how much the memory in use grows at most while some work is done."""
    if device.torch_device.type == "cpu":
        return _growth_of_host_bytes(work)
    device.synchronize()
    device.reset_peak()
    before_bytes = device.peak_bytes()
    work()
    device.synchronize()
    return device.peak_bytes() - before_bytes


def _growth_of_host_bytes(work: Callable[[], object]) -> int:
    """The same where the processor computes: its allocator tells the profiler."""
    # Else the profiler's library writes to the terminal when it begins and ends.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # without it torch 2.11 warns
    ) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live_bytes = peak_bytes = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        live_bytes += n_bytes
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes
