"""A short profile: each distinct layer really computes once or twice on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.chain import Chain, Layer
from atomtrain.analysis.costs import ChainCosts, ValueSpec

_LONGEST_S = 2.0
"""A layer that is expected to take longer is estimated from its FLOPs."""


class LayerTime(NamedTuple):
    """Seconds that one layer computes for one micro-batch."""

    forward_s: float
    """Without a graph."""
    backward_s: float
    """Forward with a graph (recomputing), then backward."""


def layer_times(
    chain: Chain,
    costs: ChainCosts,
    inputs: Mapping[str, Any],
    device: torch.device,
    synchronize: Callable[[], None],
) -> dict[str, LayerTime]:
    """Return the seconds of each kind of layer, medians of measurements on the device.

    Args:
        chain: With real parameters, on the host or the device; they are not changed.
        costs: Of the chain.
        inputs: One micro-batch, by the chain's input names.
        device: Where to measure.
        synchronize: Blocks until the device is idle.
    """
    rate = _flops_per_s(device, synchronize)
    times: dict[str, LayerTime] = {}
    generator_state = torch.get_rng_state()
    try:
        for layer, cost in zip(chain.layers, costs.layers, strict=True):
            if cost.kind in times:
                continue
            estimate_s = cost.forward_flops / rate
            both_s = estimate_s + cost.backward_flops / rate
            if estimate_s + both_s > _LONGEST_S:
                times[cost.kind] = LayerTime(estimate_s, both_s)
                continue
            values = [_value(name, costs.values[name], inputs, device) for name in layer.reads]
            times[cost.kind] = _measure(layer, values, device, synchronize)
    finally:
        torch.set_rng_state(generator_state)
    return times


def _flops_per_s(device: torch.device, synchronize: Callable[[], None]) -> float:
    size = 512 if device.type == "cpu" else 1024
    matrix = torch.ones(size, size, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)

    return 2 * size**3 / _median_s(multiply, synchronize, 3)


def _value(name: str, spec: ValueSpec, inputs: Mapping[str, Any], device: torch.device) -> Any:
    if name in inputs:
        value = inputs[name]
        return value.to(device) if isinstance(value, Tensor) else value
    if spec.dtype is None:
        return spec.constant
    if spec.dtype.is_floating_point:
        value = torch.randn(spec.shape, dtype=torch.float32, device=device).to(spec.dtype)
        return value.requires_grad_(spec.requires_grad)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _measure(
    layer: Layer, values: Sequence[Any], device: torch.device, synchronize: Callable[[], None]
) -> LayerTime:
    tensors = {
        name: parameter.detach().to(device).requires_grad_(parameter.requires_grad)
        for name, parameter in layer.parameters.items()
    }
    # Clones, because running statistics must not change.
    tensors.update({name: b.detach().to(device).clone() for name, b in layer.buffers.items()})

    def forward() -> None:
        with torch.no_grad():
            layer.run(tensors, values)

    def both() -> None:
        with torch.enable_grad():
            written = layer.run(tensors, values)
            roots = [v for v in written if isinstance(v, Tensor) and v.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    return LayerTime(_median_s(forward, synchronize, 3), _median_s(both, synchronize, 3))


def _median_s(work: Callable[[], None], synchronize: Callable[[], None], runs: int) -> float:
    work()
    synchronize()
    seconds = []
    for _ in range(runs):
        started_s = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)
